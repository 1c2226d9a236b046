"""Runs the language model demo as `farcall demo rnn` does: processes, display and report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from farcall.demos import checkpoints, rnn
from farcall.demos.corpus import CorpusError, read_corpus
from farcall.demos.display import open_display
from farcall.demos.launch import Run
from farcall.demos.report import FAILED, INTERRUPTED, print_end, write_report
from farcall.demos.rnn_report import describe_corpus, draw_losses, summarise, view

EXIT_CODES = {"finished": 0, "failed": FAILED, "interrupted": INTERRUPTED}
GRACE_SECONDS = 30.0  # a batch of a large model takes a while, and then the checkpoint is written
CHECKPOINT = "checkpoint.pt"


def prepare(
    options: rnn.RnnOptions, data: Path | None, resume: Path | None, out: Path
) -> rnn.RnnJob:
    """Reads the text, and checks it and the checkpoint, before anything is started.

    Raises:
        CorpusError: the text can't be used.
        CheckpointError: the checkpoint can't be used, or is of another model or text.
    """
    corpus = read_corpus(data, options.vocabulary)
    words = min(len(corpus.train), len(corpus.validation))
    if words < 2 * options.batch_size:
        raise CorpusError(
            f"{corpus.source} has {len(corpus.train)} words to learn and "
            f"{len(corpus.validation)} to validate: both must be at least twice the batch size "
            f"(--batch-size), which is {options.batch_size}"
        )
    if resume is not None:
        state = checkpoints.load(resume)
        checkpoints.check(resume, state, asdict(options), corpus.digest(), corpus.source)
    return rnn.RnnJob(options, corpus, out / CHECKPOINT, resume)


def run(job: rnn.RnnJob, log_interval: int, out: Path) -> int:
    """Trains, prints the summary line, writes the report into `out`, returns the exit code."""
    options, corpus = job.options, job.corpus
    click.echo(describe_corpus(corpus))
    before = results_in(job.resume) if job.resume else []
    with open_display(view(log_interval)) as display:
        training = Run(display.show, GRACE_SECONDS, display.show_started)
        training.launch(rnn.run_worker, job, world_size=len(rnn.WORKERS))
    history = [*before, *training.history]
    last = history[-1] if history else None
    done = last is not None and last.validation_loss is not None and last.epoch == options.epochs
    outcome = "finished" if done and not training.failure else training.outcome("finished")
    summary = summarise(options, corpus, history, outcome)
    curve = draw_losses(history, summary.line(), summary.unigram_perplexity)
    write_report(out, summary, {"loss": curve})
    print_end(summary, training.failure)
    return EXIT_CODES[outcome]


def results_in(checkpoint: Path) -> list[rnn.RnnProgress]:
    """Return the epochs that the checkpoint has behind it."""
    return [rnn.RnnProgress(**result) for result in checkpoints.load(checkpoint)["results"]]
