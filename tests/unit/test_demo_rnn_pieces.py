"""The parts of the language model demo, piece by piece."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from farcall.demos import checkpoints, stopwatch
from farcall.demos.rnn import RnnProgress, batches
from farcall.demos.rnn_parts import Decoder, EmbeddingTable, ModelPart, RecurrentLayers, Shape
from farcall.demos.rnn_report import describe, draw_losses, view
from farcall.demos.stopwatch import Stopwatch

SHAPE = Shape(words=11, embedding=5, hidden=7, layers=2, dropout=0.5, seed=3)
START = RnnProgress(epoch=1, epochs=12, batch=0, batches=1234)


def test_batches_read_the_text_in_columns_that_go_on_from_batch_to_batch() -> None:
    text = batches(np.arange(103), batch_size=4, bptt=7)
    assert [tuple(words.shape) for words, _ in text] == [(7, 4), (7, 4), (7, 4), (3, 4)]
    for words, targets in text:
        assert torch.equal(targets, words + 1)
    columns = torch.cat([words for words, _ in text])
    assert columns[:, 1].tolist() == list(range(25, 49))


def test_text_of_two_rows_is_one_batch() -> None:
    [(words, targets)] = batches(np.arange(9), batch_size=4, bptt=35)
    assert (words.tolist(), targets.tolist()) == ([[0, 2, 4, 6]], [[1, 3, 5, 7]])


PARTS: list[Callable[[Shape], ModelPart]] = [EmbeddingTable, RecurrentLayers, Decoder]


@pytest.mark.parametrize("part", PARTS)
def test_parts_do_not_depend_on_random_numbers_of_the_process(
    part: Callable[[Shape], ModelPart],
) -> None:
    torch.manual_seed(1)
    first = part(SHAPE)
    torch.manual_seed(2)
    torch.testing.assert_close(first.state_dict(), part(SHAPE).state_dict(), rtol=0, atol=0)


def test_state_dict_goes_on_with_dropout_where_it_was() -> None:
    table, other = EmbeddingTable(SHAPE), EmbeddingTable(SHAPE)
    words = torch.arange(8).view(4, 2)
    table(words)
    assert not torch.equal(table(words), other(words))
    other.load_state_dict(table.state_dict())
    assert torch.equal(table(words), other(words))


def test_dropout_keeps_the_mean_and_is_off_in_validation() -> None:
    part = ModelPart(seed=0, dropout=0.25)
    ones = torch.ones(100, 100)
    dropped = part.drop(ones)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    part.set_training(False)
    assert part.drop(ones) is ones


def test_validation_records_no_graph_and_measures_nothing() -> None:
    table, lstm, decoder = EmbeddingTable(SHAPE), RecurrentLayers(SHAPE), Decoder(SHAPE)
    for part in (table, lstm, decoder):
        part.set_training(False)
    words = torch.arange(8).view(4, 2)
    output, _ = lstm(table(words), None)
    assert not decoder(output, words).requires_grad
    assert [part.seconds_computed() for part in (table, lstm, decoder)] == [0, 0, 0]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a clock that is a second further whenever it is read."""
    monkeypatch.setattr(stopwatch.time, "perf_counter", itertools.count().__next__)


@pytest.mark.usefixtures("ticks")
def test_parts_measure_each_forward_and_each_backward_pass() -> None:
    parts = table, lstm, decoder = EmbeddingTable(SHAPE), RecurrentLayers(SHAPE), Decoder(SHAPE)
    words = torch.arange(8).view(4, 2)
    for _ in range(3):
        sent_vectors = table(words)
        vectors = sent_vectors.detach().requires_grad_()  # as they arrive on another worker
        sent_output, _ = lstm(vectors, None)
        output = sent_output.detach().requires_grad_()
        loss = decoder(output, words)
        assert [part.seconds_computed() for part in parts] == [1, 1, 1]
        loss.backward()
        sent_output.backward(output.grad)
        sent_vectors.backward(vectors.grad)
        assert [part.seconds_computed() for part in parts] == [1, 1, 1]


@pytest.mark.usefixtures("ticks")
def test_stopwatch_that_was_not_started_measures_nothing() -> None:
    watch = Stopwatch()
    watch.stop()
    assert watch.take() == 0
    with watch.running():
        pass
    assert (watch.take(), watch.take()) == (1, 0)


def test_progress_adds_up_batches() -> None:
    after = START.after_batch(2.0, 30, 0.5).after_batch(5.0, 10, 0.5)
    assert (after.batch, after.words, after.batch_loss) == (2, 40, 5.0)
    assert after.loss == pytest.approx(2.75)
    assert after.words_per_second == 40


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_diverging_training_says_which_option_to_change(loss: float) -> None:
    with pytest.raises(
        ArithmeticError, match=r"batch 1 in epoch 1 is (nan|inf): .*--learning-rate"
    ):
        START.after_batch(loss, 10, 1.0)


def test_lines_fit_a_terminal_of_80_columns() -> None:
    """Print also more epochs, batches, words per second and doubt than usual."""
    batch = RnnProgress(99, 99, 99_999, 99_999, 700, 9.2 * 700, 9.2, 0.01)
    done = RnnProgress(99, 99, 999, 999, 70_000, 6.9 * 70_000, 6.9, 1.5, 0.2, 20, 6.9)
    assert "70000 words/s" in describe(batch)
    assert "46667 words/s" in describe(done)
    for progress in (batch, done):
        assert len(describe(progress)) < 80


def test_log_has_every_nth_batch_and_every_epoch() -> None:
    logged = view(log_interval=10).is_logged
    at_20 = RnnProgress(1, 2, 20, 20)
    validating = RnnProgress(1, 2, 20, 20, validated=1)
    done = RnnProgress(1, 2, 25, 25, validated=2, validation_loss=5.0)
    assert logged(at_20)
    assert not logged(RnnProgress(1, 2, 21, 25))
    assert not logged(validating)
    assert logged(done)


def test_bar_is_empty_at_first_and_full_when_all_is_done() -> None:
    fraction = view(log_interval=10).fraction
    assert fraction(RnnProgress(1, 4, 0, 10)) == 0
    assert fraction(RnnProgress(3, 4, 5, 10)) == pytest.approx(2.5 / 4)
    assert fraction(RnnProgress(4, 4, 10, 10)) == 1


@pytest.mark.filterwarnings("error")
def test_curve_of_a_run_that_got_nowhere_can_be_drawn(tmp_path: Path) -> None:
    draw_losses([], "nothing", 226.0).savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    state: dict[str, Any] = {
        "hidden": (torch.ones(2), torch.zeros(3)),
        "words": ["a", "b"],
        "model": nn.Linear(2, 2).state_dict(),
    }
    checkpoints.save(path, state)
    torch.testing.assert_close(checkpoints.load(path)["model"], state["model"])
    assert checkpoints.load(path)["words"] == state["words"]
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_checkpoint_that_could_not_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoints.save(path, {"number": 1})
    with pytest.raises(Exception, match="pickle"):
        checkpoints.save(path, {"number": lambda: 2})
    assert checkpoints.load(path)["number"] == 1
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


class Intruder:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_loading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    path, made = tmp_path / "checkpoint.pt", tmp_path / "made"
    for write in (
        lambda: torch.save({"format": checkpoints.FORMAT, "x": Intruder(made)}, path),
        lambda: path.write_bytes(pickle.dumps(Intruder(made), protocol=2)),
    ):
        write()
        with pytest.raises(checkpoints.CheckpointError, match="is not a checkpoint"):
            checkpoints.load(path)
        assert not made.exists()


def test_missing_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(checkpoints.CheckpointError, match="No such file"):
        checkpoints.load(tmp_path / "missing.pt")
