"""Reports of the language model demo: the lines while it goes, summary, picture."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import ArrayLike

from farcall.demos.corpus import Corpus
from farcall.demos.display import View
from farcall.demos.rnn import RnnOptions, RnnProgress

LARGEST_LOSS = 700.0  # nats; e to the power of a bit more is no number any more


def perplexity(loss: float) -> float:
    """Return among how many words the model is in doubt, on average, at a loss in nats."""
    return math.exp(min(loss, LARGEST_LOSS))


@dataclass(frozen=True)
class EpochResult:
    """One epoch, as `summary.json` holds it. Losses are in nats per word."""

    epoch: int
    train_loss: float
    train_perplexity: float
    validation_loss: float
    validation_perplexity: float
    seconds: float
    words_per_second: float
    communication: float


@dataclass(frozen=True)
class RnnSummary:
    """The outcome of a run.

    `outcome` is "finished", "interrupted" or "failed". `seconds` is the time spent in training
    steps; `communication` is the share of it in which no worker computed. Both, and all other
    numbers, are of the whole training: epochs before a `--resume` count too. Numbers that are
    not known, as no epoch was done, are None.
    """

    outcome: str
    source: str
    train_words: int
    validation_words: int
    words_known: int
    unigram_perplexity: float
    epochs_done: int
    seconds: float
    words_per_second: float
    train_perplexity: float | None
    validation_perplexity: float | None
    communication: float | None
    results: list[EpochResult]
    options: RnnOptions

    def line(self) -> str:
        """Return the one line that ends a run."""
        start = f"rnn {self.outcome} after {self.epochs_done} epochs, {self.seconds:.1f} s: "
        rate = f"{self.words_per_second:.0f} words/s"
        if self.validation_perplexity is None or self.communication is None:
            return start + rate
        return (
            f"{start}validation perplexity {self.validation_perplexity:.1f} "
            f"(unigrams {self.unigram_perplexity:.1f}), {rate}, "
            f"{100 * self.communication:.0f} % communication"
        )

    def fields(self) -> dict[str, object]:
        """Return the fields of `summary.json`: the numbers, and the run's options beside them."""
        numbers = asdict(self)
        return {"demo": "rnn", **numbers.pop("options"), **numbers}


def result_of(done: RnnProgress) -> EpochResult:
    """Return the numbers of an epoch that is done."""
    assert done.validation_loss is not None
    return EpochResult(
        epoch=done.epoch,
        train_loss=done.loss,
        train_perplexity=perplexity(done.loss),
        validation_loss=done.validation_loss,
        validation_perplexity=perplexity(done.validation_loss),
        seconds=done.seconds,
        words_per_second=done.words_per_second,
        communication=done.communication,
    )


def epochs_of(history: list[RnnProgress]) -> list[RnnProgress]:
    """Return the last progress of each epoch in the history, in order."""
    return list({progress.epoch: progress for progress in history}.values())


def summarise(
    options: RnnOptions, corpus: Corpus, history: list[RnnProgress], outcome: str
) -> RnnSummary:
    """Return the summary of a run that got as far as `history`, which may be empty."""
    epochs = epochs_of(history)
    done = [progress for progress in epochs if progress.validation_loss is not None]
    results = [result_of(progress) for progress in done]
    last = results[-1] if results else None
    seconds = sum(progress.seconds for progress in epochs)
    words = sum(progress.words for progress in epochs)
    measured = sum(progress.seconds for progress in done)
    computing = sum(progress.computing for progress in done)
    return RnnSummary(
        outcome=outcome,
        source=corpus.source,
        train_words=len(corpus.train),
        validation_words=len(corpus.validation),
        words_known=len(corpus.vocabulary),
        unigram_perplexity=corpus.unigram_perplexity(),
        epochs_done=len(done),
        seconds=seconds,
        words_per_second=words / seconds if seconds else 0.0,
        train_perplexity=last.train_perplexity if last else None,
        validation_perplexity=last.validation_perplexity if last else None,
        communication=max(0.0, 1 - computing / measured) if measured else None,
        results=results,
        options=options,
    )


def describe_corpus(corpus: Corpus) -> str:
    """Return one line with the task, and the result of a model without memory."""
    return (
        f"{corpus.source}: {len(corpus.train)} words to learn, {len(corpus.validation)} to "
        f"validate, {len(corpus.vocabulary)} different; "
        f"unigram perplexity {corpus.unigram_perplexity():.1f}"
    )


def describe(progress: RnnProgress) -> str:
    """Return one line on the state of the run, which fits a terminal of 80 columns."""
    epoch = f"epoch {progress.epoch:2d}/{progress.epochs}"
    if progress.validation_loss is not None:
        return (
            f"{epoch}  train {_loss(progress.loss)}  valid {_loss(progress.validation_loss)}  "
            f"{progress.words_per_second:.0f} words/s  {100 * progress.communication:.0f}% comm"
        )
    if progress.validated:
        return f"{epoch}  validating, batch {progress.validated}"
    return (
        f"{epoch}  batch {progress.batch:4d}/{progress.batches}  "
        f"train {_loss(progress.loss)}  {progress.words_per_second:.0f} words/s"
    )


def _loss(loss: float) -> str:
    in_doubt = perplexity(loss)
    return f"{loss:.2f} ppl {in_doubt:.{1 if in_doubt < 100 else 0}f}"


def view(log_interval: int) -> View[RnnProgress]:
    """Return a bar that is full after all epochs; a log line every `log_interval` batches."""
    return View(
        describe=describe,
        fraction=lambda p: (p.epoch - 1 + p.batch / p.batches) / p.epochs,
        scale=lambda p: f"epoch {p.epoch} of {p.epochs}",
        is_logged=lambda p: (
            p.validation_loss is not None or (not p.validated and p.batch % log_interval == 0)
        ),
        stays=lambda p: p.validation_loss is not None,
    )


def draw_losses(history: list[RnnProgress], title: str, unigram_perplexity: float) -> Figure:
    """Return the loss curve: every batch, and the epochs' training and validation losses."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    batches = [p for p in history if not p.validated]
    done = [p for p in epochs_of(history) if p.validation_loss is not None]
    epochs = [p.epoch for p in done]
    axes.plot(
        [p.epoch - 1 + p.batch / p.batches for p in batches],
        [p.batch_loss for p in batches],
        linewidth=0.8,
        alpha=0.4,
        label="batch",
    )
    axes.plot(epochs, [p.loss for p in done], marker="o", label="training, mean of the epoch")
    validation = [p.validation_loss for p in done if p.validation_loss is not None]
    axes.plot(epochs, validation, marker="o", label="validation")
    unigram = f"validation, word frequencies only (perplexity {unigram_perplexity:.0f})"
    axes.axhline(math.log(unigram_perplexity), linestyle="--", color="grey", label=unigram)
    axes.set(xlabel="epoch", ylabel="loss (nats per word)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    right = axes.secondary_yaxis("right", functions=(np.exp, _log))
    right.set_ylabel("perplexity")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _log(values: ArrayLike) -> ArrayLike:
    """Return the logarithm, also of the zero that matplotlib tries before it knows the limits."""
    logarithms: ArrayLike = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    return logarithms
