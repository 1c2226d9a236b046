"""`farcall demo rnn`, run as a user runs it: in processes of its own."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from demos import (
    assert_nothing_left,
    read_until,
    refused,
    run_farcall,
    start_demo,
    workers_of,
)
from optional import skip_without
from patience import PATIENCE
from torch import nn

from farcall.demos import checkpoints
from farcall.demos.corpus import read_corpus
from farcall.demos.rnn import LARGEST_NORM, RnnOptions, batches
from farcall.demos.rnn_parts import Decoder, EmbeddingTable, Hidden, RecurrentLayers

skip_without("matplotlib")

pytestmark = pytest.mark.preloads(
    "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.ticker"
)

SMALL = ("--embedding", "32", "--hidden", "64", "--dropout", "0.1", "--vocabulary", "300")
RUN = ("demo", "rnn", *SMALL, "--batch-size", "40", "--learning-rate", "0.02")
SUMMARY_LINE = re.compile(
    r"rnn (\w+) after (\d+) epochs, [\d.]+ s: validation perplexity ([\d.]+) "
    r"\(unigrams ([\d.]+)\), \d+ words/s, \d+ % communication"
)
EPOCH_LINE = re.compile(
    r"epoch +\d+/\d+  train [\d.]+ ppl [\d.]+  valid [\d.]+ ppl [\d.]+  "
    r"\d+ words/s  \d+% comm"
)
BATCH_LINE = re.compile(r"epoch +\d+/\d+  batch +\d+/\d+  train [\d.]+ ppl [\d.]+  \d+ words/s")


class Trained(NamedTuple):
    """A small run of two epochs."""

    result: subprocess.CompletedProcess[str]
    out: Path

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return summary


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("rnn")
    options = ("--epochs", "2", "--log-interval", "20", "--out", out)
    return Trained(run_farcall(*RUN, *options), out)


def test_validation_perplexity_falls_clearly_below_that_of_word_frequencies(
    trained: Trained,
) -> None:
    assert trained.result.returncode == 0, trained.result.stderr
    summary = trained.summary
    first, last = (result["validation_perplexity"] for result in summary["results"])
    assert last < 0.9 * first
    assert last < 0.75 * summary["unigram_perplexity"]


def test_every_epoch_and_the_end_have_their_line(trained: Trained) -> None:
    text, start, *logged, last = trained.result.stdout.splitlines()
    assert "unigram perplexity" in text
    assert start == "starting the workers"
    epochs = [line for line in logged if EPOCH_LINE.fullmatch(line)]
    assert len(epochs) == 2
    assert all(BATCH_LINE.fullmatch(line) for line in logged if line not in epochs)
    assert len(logged) > len(epochs)
    assert max(map(len, logged)) < 80
    found = SUMMARY_LINE.fullmatch(last)
    assert found, last
    assert found.group(1, 2) == ("finished", "2")
    assert float(found[3]) == pytest.approx(trained.summary["validation_perplexity"], abs=0.05)


def test_summary_holds_the_numbers_of_the_run(trained: Trained) -> None:
    summary = trained.summary
    assert (summary["outcome"], summary["epochs_done"], summary["hidden"]) == ("finished", 2, 64)
    assert summary["words_known"] == 300
    for number, result in enumerate(summary["results"], start=1):
        assert result["epoch"] == number
        for part in ("train", "validation"):
            perplexity = math.exp(result[f"{part}_loss"])
            assert result[f"{part}_perplexity"] == pytest.approx(perplexity)
        assert 0 < result["communication"] < 1
        assert result["words_per_second"] > 0
    assert summary["validation_perplexity"] == summary["results"][-1]["validation_perplexity"]
    assert summary["seconds"] == pytest.approx(sum(r["seconds"] for r in summary["results"]))


@pytest.mark.usefixtures("trained")
def test_loss_curve_is_a_readable_picture(trained: Trained) -> None:
    assert (trained.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = pytest.importorskip("matplotlib.image")
    height, width, channels = image.imread(trained.out / "loss.png").shape
    assert (height > 100, width > 100, channels) == (True, True, 4)


class LocalModel:
    """The same model in one process: the same parts, plain autograd and a plain optimizer."""

    def __init__(self, options: RnnOptions, words: int) -> None:
        shape = options.shape(words)
        self.parts: dict[str, nn.Module] = {
            "table": EmbeddingTable(shape),
            "lstm": RecurrentLayers(shape),
            "decoder": Decoder(shape),
        }
        self.parameters = [p for part in self.parts.values() for p in part.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=options.learning_rate)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, options.decay)

    def train_epoch(self, text: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        hidden: Hidden | None = None
        for words, targets in text:
            output, hidden = self.parts["lstm"](self.parts["table"](words), hidden)
            self.parts["decoder"](output, targets).backward()
            hidden = (hidden[0].detach(), hidden[1].detach())
            nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.schedule.step()


def test_parameters_are_those_of_the_same_model_trained_in_one_process(trained: Trained) -> None:
    state = checkpoints.load(trained.out / "checkpoint.pt")
    options = RnnOptions(**state["options"])
    corpus = read_corpus(None, options.vocabulary)
    local = LocalModel(options, len(corpus.vocabulary))
    text = batches(corpus.train, options.batch_size, options.bptt)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(options.epochs):
            local.train_epoch(text)
    finally:
        torch.set_num_threads(threads)
    for name, part in local.parts.items():
        for key, value in part.state_dict().items():
            torch.testing.assert_close(state["model"][name][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_run_stopped_by_ctrl_c_goes_on_as_if_it_had_never_stopped(
    trained: Trained, tmp_path: Path
) -> None:
    process = start_demo(*RUN, "--epochs", "2", "--log-interval", "1", "--out", tmp_path)
    read_until(process, "epoch  1/2  batch    3")
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stdout + stderr
    assert re.match(r"rnn interrupted after [01] epochs, ", stdout.splitlines()[-1])
    assert_nothing_left(process.pid)
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"
    assert (tmp_path / "loss.png").exists()

    checkpoint = tmp_path / "checkpoint.pt"
    stopped = checkpoints.load(checkpoint)["progress"]
    assert (1, 3) <= (stopped["epoch"], stopped["batch"]) < (2, stopped["batches"])

    resumed = run_farcall(*RUN, "--epochs", "2", "--resume", checkpoint, "--out", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    ours, theirs = (checkpoints.load(path / "checkpoint.pt") for path in (tmp_path, trained.out))
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours["optimizer"], theirs["optimizer"], rtol=1e-5, atol=1e-7)
    losses = [[result["loss_sum"] for result in state["results"]] for state in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [result["epoch"] for result in summary["results"]] == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_dead_worker_ends_the_demo_with_a_clear_error(tmp_path: Path) -> None:
    process = start_demo(*RUN, "--log-interval", "1", "--out", tmp_path)
    read_until(process, "epoch")
    os.kill(max(workers_of(process.pid)), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Error: rank" in stderr
    assert stdout.splitlines()[-1].startswith("rnn failed after")
    assert_nothing_left(process.pid)


def test_checkpoint_of_another_model_or_text_is_refused_by_name(
    trained: Trained, tmp_path: Path
) -> None:
    resume = (*RUN, "--resume", trained.out / "checkpoint.pt", "--epochs")
    text = tmp_path / "text.txt"
    text.write_text("some other words \n\n" * 1000)
    assert "has 2 epochs behind it already: ask for more with --epochs" in refused(*resume, "2")
    assert "was made with --hidden 64, not 48" in refused(*resume, "3", "--hidden", "48")
    assert "was made with --seed 0, not 1" in refused(*resume, "3", "--seed", "1")
    another = f"was made from another text than {text}"
    assert another in refused(*resume, "3", "--data", text)


def test_resume_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "checkpoint.pt"
    torch.save({"weights": torch.ones(2)}, other)
    garbage = tmp_path / "garbage.pt"
    garbage.write_bytes(b"no checkpoint at all")
    for path in (other, garbage):
        says = refused("demo", "rnn", "--resume", path, "--out", tmp_path)
        assert f"{path} is not a checkpoint of this demo" in says


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "has no words"), (b"caf\xe9", "is not UTF-8 text"), (b"a word " * 40, "--batch-size")],
)
def test_unusable_text_is_refused_before_anything_starts(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert says in refused("demo", "rnn", "--data", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_any_text_will_do(tmp_path: Path) -> None:
    """WikiText among them: spaced words, `<unk>`, headings between `=`."""
    path = tmp_path / "wiki.tokens"
    article = " = A Title = \n \n The <unk> of 3 @,@ 500 words is a @-@ b , it is said . \n \n"
    path.write_text(article * 60)
    small = ("--embedding", "8", "--hidden", "8", "--batch-size", "4", "--learning-rate", "0.03")
    result = run_farcall("demo", "rnn", "--epochs", "2", *small, "--data", path, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["source"] == str(path)
    assert summary["validation_perplexity"] < summary["unigram_perplexity"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--data", "/missing/file"),
        ("--resume", "/missing/file"),
        ("--epochs", "0"),
        ("--hidden", "0"),
        ("--dropout", "1"),
        ("--learning-rate", "nan"),
        ("--decay", "0"),
        ("--bptt", "0"),
        ("--seed", "-1"),
        ("--out", "/dev/null/folder"),
    ],
)
def test_bad_option_is_named_and_nothing_starts(option: str, value: str) -> None:
    assert option in refused("demo", "rnn", option, value)
