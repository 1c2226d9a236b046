"""The algorithm of `farcall demo parameter-server`, with all workers in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
from clusters import patient_cluster
from optional import skip_without
from torch import Tensor
from torch.nn.functional import cross_entropy

from farcall import rpc
from farcall.demos.parameter_server import (
    Job,
    Parameters,
    ParameterServerOptions,
    ParameterServerProgress,
    Pictures,
    SyncServer,
    SyncTrainer,
    load_digits,
    make_model,
)
from farcall.testing.cluster import acting_as

skip_without("sklearn")

Mode = Literal["async", "sync"]
OPTIONS = ParameterServerOptions(
    mode="sync", trainers=3, epochs=2, batch_size=8, learning_rate=0.01, hogwild=False, seed=7
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are fastest so, above all where three trainers share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def float64() -> Iterator[None]:
    """Equal computations differ less from each other."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pictures(count: int) -> Pictures:
    generator = torch.Generator().manual_seed(count)
    images = torch.rand(count, 1, 8, 8, generator=generator)
    return Pictures(images, torch.randint(10, (count,), generator=generator))


def run(job: Job) -> ParameterServerProgress:
    return list(job.train())[-1]


def parameters_after(options: ParameterServerOptions, training: Pictures) -> Parameters:
    with patient_cluster(options.trainers + 1) as workers, acting_as(workers[0]):
        job = Job(options, training, pictures(10))
        run(job)
        return {name: value.detach() for name, value in job.server.model.named_parameters()}


def parameters_in_one_process(options: ParameterServerOptions, training: Pictures) -> Parameters:
    """Train in a plain loop, each of whose batches has one batch of every trainer."""
    torch.manual_seed(options.seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    for batches in itertools.zip_longest(*batches_of_trainers(options, training)):
        delivered = [batch for batch in batches if batch is not None]
        images = torch.cat([batch.images for batch in delivered])
        labels = torch.cat([batch.labels for batch in delivered])
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def batches_of_trainers(
    options: ParameterServerOptions, training: Pictures
) -> list[list[Pictures]]:
    """Return the batches that `Job` spreads: every trainer has each n-th picture."""
    with patient_cluster(options.trainers + 1) as workers, acting_as(workers[0]):
        trainers = [rref.to_here() for rref in Job(options, training, training).trainers]
        return [list(trainer.batches()) for trainer in trainers]


def rows(*parts: Pictures) -> list[list[float]]:
    """Return all pictures, each with its label, in an order of their own."""
    return sorted(
        [float(label), *image.flatten().tolist()]
        for part in parts
        for image, label in zip(*part, strict=True)
    )


# The data.


def test_every_digit_has_its_share_of_both_parts_and_none_is_lost_or_doubled() -> None:
    training, test = load_digits(seed=3)
    assert (len(training.labels), len(test.labels)) == (1437, 360)
    assert test.images.shape == (360, 1, 8, 8)
    for part in (training, test):
        counts = torch.bincount(part.labels, minlength=10) / len(part.labels)
        assert torch.allclose(counts, torch.full((10,), 0.1), atol=0.005)
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, digits = datasets.load_digits(return_X_y=True)
    everything = Pictures(torch.tensor(pixels / 16).float(), torch.tensor(digits))
    assert rows(training, test) == rows(everything)


def test_seed_decides_which_pictures_are_for_testing() -> None:
    first, same, other = (load_digits(seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first.images, same.images)
    assert not torch.equal(first.images, other.images)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_trainers_share_the_training_pictures_and_get_none_for_testing(mode: Mode) -> None:
    training, test = pictures(50), pictures(20)
    with patient_cluster(4) as workers, acting_as(workers[0]):
        job = Job(replace(OPTIONS, mode=mode), training, test)
        trainers = [rref.to_here() for rref in job.trainers]
    assert rows(*(trainer.pictures for trainer in trainers)) == rows(training)
    assert [len(trainer.pictures.labels) for trainer in trainers] == [17, 17, 16]


def test_epoch_has_every_picture_once_in_an_order_of_its_own() -> None:
    part = pictures(20)
    trainer = SyncTrainer(1, part, replace(OPTIONS, batch_size=6), server=None)  # type: ignore[arg-type]
    batches = list(trainer.batches())
    assert [len(batch.labels) for batch in batches] == 2 * [6, 6, 6, 2]
    first, second = batches[:4], batches[4:]
    assert rows(*first) == rows(*second) == rows(part)
    assert not torch.equal(first[0].images, second[0].images)


# Training.


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("count", "batch_size", "batches"),
    [(48, 8, [4, 4, 4]), (50, 8, [6, 6, 4]), (50, 16, [4, 4, 2]), (4, 1, [4, 2, 2])],
)
def test_sync_training_is_that_of_one_process_with_the_batches_of_all_trainers(
    count: int, batch_size: int, batches: list[int]
) -> None:
    options = replace(OPTIONS, batch_size=batch_size)
    training = pictures(count)
    assert [len(of_one) for of_one in batches_of_trainers(options, training)] == batches
    ours = parameters_after(options, training)
    torch.testing.assert_close(ours, parameters_in_one_process(options, training))


def test_sync_training_repeats_exactly() -> None:
    first, second = (parameters_after(OPTIONS, pictures(50)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("float64")
def test_async_training_with_one_trainer_is_that_of_one_process() -> None:
    options = replace(OPTIONS, mode="async", trainers=1)
    ours = parameters_after(options, pictures(50))
    torch.testing.assert_close(ours, parameters_in_one_process(options, pictures(50)))


# Hogwild: Adam's first steps may meet each other's half-made moments. The parameters may leap then,
# and learning begins again from there, which takes some epochs more; or they leap to where nothing
# can be learned any more. So there are three attempts: that is what hogwild promises, and no more.
@pytest.mark.parametrize(
    ("mode", "hogwild", "epochs"), [("async", False, 5), ("async", True, 10), ("sync", False, 5)]
)
def test_trainers_learn_together_to_tell_digits_apart(
    mode: Mode, hogwild: bool, epochs: int
) -> None:
    reached = 0.0
    for seed in range(3 if hogwild else 1):
        options = replace(
            OPTIONS, mode=mode, hogwild=hogwild, epochs=epochs, batch_size=16, seed=7 + seed
        )
        with patient_cluster(4) as workers, acting_as(workers[0]):
            job = Job(options, *load_digits(seed=0))
            progress = job.train()
            assert next(progress).accuracy < 0.5
            for measured in progress:
                # A leap may come at any time, also at the end.
                reached = max(measured.accuracy, reached if hogwild else 0.0)
                if hogwild and reached > 0.8:
                    job.stop()
        if reached > 0.8:
            break
    assert reached > 0.8


@pytest.mark.parametrize(
    ("mode", "hogwild", "updates"), [("async", False, 18), ("async", True, 18), ("sync", False, 6)]
)
def test_run_counts_updates_and_pictures(mode: Mode, hogwild: bool, updates: int) -> None:
    options = replace(OPTIONS, mode=mode, hogwild=hogwild)
    with patient_cluster(4) as workers, acting_as(workers[0]):
        history = list(Job(options, pictures(60), pictures(10)).train())
    assert [progress.number for progress in history] == list(range(len(history)))
    assert (history[0].updates, history[0].images, history[0].seconds) == (0, 0, 0.0)
    assert (history[-1].updates, history[-1].images, history[-1].epochs) == (updates, 120, 2.0)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_accuracy_is_the_share_of_right_answers(mode: Mode) -> None:
    test = pictures(40)
    with patient_cluster(4) as workers, acting_as(workers[0]):
        job = Job(replace(OPTIONS, mode=mode), pictures(60), test)
        last = run(job)
        answers = job.server.model(test.images).argmax(dim=1)
    right = sum(int(a == b) for a, b in zip(answers, test.labels, strict=True))
    assert last.accuracy == right / 40


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_job_that_is_stopped_ends_before_its_last_epoch(mode: Mode) -> None:
    with patient_cluster(4) as workers, acting_as(workers[0]):
        job = Job(replace(OPTIONS, mode=mode, epochs=10**6), pictures(60), pictures(10))
        history = []
        for progress in job.train():
            history.append(progress)
            if progress.images:
                job.stop()
    assert 0 < history[-1].epochs < 10**6


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_error_on_a_trainer_ends_the_job_with_it(mode: Mode) -> None:
    training = pictures(60)
    training.labels[1] = 99  # the first of trainer 2
    with patient_cluster(4) as workers, acting_as(workers[0]):
        job = Job(replace(OPTIONS, mode=mode, epochs=1), training, pictures(10))
        with pytest.raises(IndexError, match="99") as raised:
            run(job)
    assert raised.value.remote_worker == "w2"  # type: ignore[attr-defined]


# The synchronous server.


def filled(server: SyncServer, value: float) -> list[Tensor]:
    """Return a gradient for every parameter."""
    return [torch.full_like(parameter, value) for parameter in server.model.parameters()]


def test_sync_update_divides_the_gradients_by_the_number_of_images() -> None:
    server = SyncServer(replace(OPTIONS, trainers=2))
    server.optimizer = torch.optim.SGD(server.model.parameters(), lr=1.0)  # type: ignore[assignment]
    before = server.fetch()
    first = server.update_and_fetch(2, filled(server, 6.0), 3)
    assert not first.done()
    after = server.update_and_fetch(1, filled(server, 4.0), 1).wait()
    assert first.wait() is after
    for name in before:
        torch.testing.assert_close(after[name], before[name] - (6 + 4) / (3 + 1))


def test_trainer_that_leaves_is_not_waited_for() -> None:
    server = SyncServer(replace(OPTIONS, trainers=3))
    futures = [server.update_and_fetch(rank, filled(server, 1.0), 1) for rank in (1, 3)]
    assert not any(future.done() for future in futures)
    server.leave(2)
    assert all(future.done() for future in futures)
    server.leave(1)
    assert server.update_and_fetch(3, filled(server, 1.0), 1).done()


def test_leaving_without_a_gradient_in_wait_changes_nothing() -> None:
    server = SyncServer(replace(OPTIONS, trainers=2))
    before = server.fetch()
    for rank in (1, 2):
        server.leave(rank)
    assert all(torch.equal(value, before[name]) for name, value in server.fetch().items())


def test_server_of_one_thread_answers_others_while_a_trainer_waits_for_the_rest() -> None:
    with patient_cluster(2, num_worker_threads=1) as workers, acting_as(workers[1]):
        server: rpc.RRef[SyncServer] = rpc.remote("w0", SyncServer, (replace(OPTIONS, trainers=2),))
        before = server.rpc_sync().fetch()
        ones = [torch.ones_like(value) for value in before.values()]
        first = server.rpc_async().update_and_fetch(1, ones, 1)
        now = server.rpc_sync().fetch()
        assert all(torch.equal(now[name], before[name]) for name in before)
        assert not first.done()
        second = server.rpc_async().update_and_fetch(2, ones, 1)
        for name, value in first.wait().items():
            assert torch.equal(value, second.wait()[name])
            assert not torch.equal(value, before[name])
