"""Records and hellos that are signed with certificates: which are believed, and until when."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from authorities import DAY, KEYS, Authority
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from patience import PATIENCE
from test_signed_records import altered, copy, put, raw, worker
from torch.distributed import HashStore, PrefixStore, Store

from farcall.errors import AuthenticationFailed, RendezvousError
from farcall.ids import Worker
from farcall.runtime.membership import certificate_signer, fixed_group, rendezvous
from farcall.runtime.membership.certificate_signer import CertificateSigner
from farcall.runtime.membership.lookup import Reminder
from farcall.runtime.membership.records import CONFIRMATION, RECORD, Confirmation
from farcall.runtime.membership.rendezvous import Rendezvous
from farcall.runtime.membership.signed_store import SignedStore
from farcall.runtime.membership.signing import MembershipProof, Signer, signer_of
from farcall.transport.connect import chains
from farcall.transport.connect.handshake_messages import MAX_MEMBERSHIP, Identity
from farcall.transport.connect.tls_config import TlsConfig

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def usage(*, signs: bool, issues: bool) -> x509.KeyUsage:
    return x509.KeyUsage(signs, False, False, False, False, issues, issues, False, False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "farcall"):
        yield lambda: [
            record.getMessage() for record in caplog.records if "signed so" in record.getMessage()
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what moves the clock that certificates are judged by, to so many days from now."""
    begun = chains.now()

    def move(days: float) -> None:
        for module in (chains, certificate_signer):
            monkeypatch.setattr(module, "now", lambda: begun + DAY * days)

    return move


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[TlsConfig], Signer]:
    """Return what makes a signer of a certificate that no honest worker would start with."""

    def make(config: TlsConfig) -> Signer:
        with monkeypatch.context() as patch:
            span = chains.Validity(chains.now() - DAY, chains.now() + DAY)
            patch.setattr(certificate_signer, "check_chain", lambda *_: span)
            patch.setattr("farcall.transport.connect.credentials._check_time", lambda *_: None)
            return signer_of(None, config)

    return make


def board(store: Store, signer: Signer, prefix: str = "farcall/open") -> SignedStore:
    return SignedStore(PrefixStore(prefix, store), prefix, signer)


def join(store: Store, one: Worker, signer: Signer) -> Rendezvous:
    """Join an open group."""
    rendezvous = Rendezvous(store, "farcall/open", signer)
    rendezvous.join(one, None, PATIENCE)
    return rendezvous


@pytest.mark.parametrize(
    ("reads", "signs", "words"),
    [
        ("secret", "nothing", "it is not signed.*FARCALL_SECRET"),
        ("secret", "another secret", "FARCALL_SECRET is the same"),
        ("secret", "certificate", "perhaps with a certificate.*FARCALL_TLS_CERT"),
        ("secret", "both", "perhaps with a certificate.*FARCALL_TLS_CERT"),
        ("certificate", "nothing", "not signed with a certificate.*FARCALL_TLS_CERT"),
        ("certificate", "secret", "not signed with a certificate.*FARCALL_TLS_CERT"),
        ("certificate", "both", "FARCALL_SECRET.*same on all workers"),
        ("both", "certificate", "FARCALL_SECRET.*same on all workers"),
        ("both", "both, another secret", "FARCALL_SECRET.*same on all workers"),
        ("nothing", "secret", "no credential: check that FARCALL_SECRET"),
        ("nothing", "certificate", "no credential: check that FARCALL_SECRET, or the certificates"),
    ],
)
def test_objection_says_what_differs_between_the_settings(
    authority: Authority, reads: str, signs: str, words: str
) -> None:
    config, secret, another = authority.issue("w0", "w0"), bytes(32), bytes([1]) * 32
    signers = {
        "nothing": signer_of(None, None),
        "secret": signer_of(secret, None),
        "another secret": signer_of(another, None),
        "certificate": signer_of(None, config),
        "both": signer_of(secret, config),
        "both, another secret": signer_of(another, config),
    }
    objection = signers[reads].objection(b"data", signers[signs].sign(b"data"), "w0")
    assert re.search(words, str(objection))


# --- whose words are believed


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("below", [0, 2])
def test_workers_with_keys_of_any_kind_believe_each_other(
    tmp_path: Path, store: HashStore, kind: str, below: int
) -> None:
    authority = Authority(tmp_path, make_key=KEYS[kind])
    for number in range(below):
        authority = Authority(
            tmp_path, f"below{number}", make_key=KEYS[kind], above=authority,
            more=(usage(signs=False, issues=True),),
        )  # fmt: skip
    both = (x509.ExtendedKeyUsage([CLIENT, SERVER]), usage(signs=True, issues=False))
    w0, w1 = (authority.signer(name, name, more=both) for name in ("w0", "w1"))
    join(store, worker("w0", 0), w0)
    assert join(store, worker("w1", 1), w1).find("w0") is not None
    assert len(w0.sign(b"x")) < MAX_MEMBERSHIP


def test_of_ten_thousand_altered_records_none_is_accepted(
    authority: Authority, store: HashStore
) -> None:
    draw = random.Random(25)
    signers = [authority.signer(f"w{rank}", f"w{rank}", binds=True) for rank in range(4)]
    values: dict[str, bytes] = {}
    for rank, signer in enumerate(signers):
        join(store, worker(f"w{rank}", rank), signer)
        values |= {key: raw(store, key) for key in (f"name/w{rank}", f"rank/{rank}")}
    here = board(store, signers[0])
    tried = accepted = 0
    while tried < 10_000:
        key = draw.choice(list(values))
        value = altered(draw, values[key], [*values.values()])
        if value == values[key]:
            continue
        put(store, key, value)
        tried += 1
        accepted += here.read(key, RECORD).value is not None
    assert accepted == 0
    for key, value in values.items():
        put(store, key, value)
        assert here.read(key, RECORD).value is not None


def refused(store: Store, signer: Signer, lines: Callable[[], list[str]]) -> str:
    """Return what the log says, once, of the record of w1, which is not believed."""
    group = Rendezvous(store, "farcall/open", signer)
    for _ in range(5):
        assert group.find("w1") is None
    [line] = lines()
    assert "farcall/open/name/w1" in line
    return line.partition("ignored, since ")[2]


Strangers = Callable[[Authority, Path, Callable[[TlsConfig], Signer]], Signer]
STRANGERS: dict[str, tuple[Strangers, str]] = {
    "no credential": (lambda *_: signer_of(None, None), "not signed with a certificate"),
    "a secret": (lambda *_: signer_of(bytes(32), None), "not signed with a certificate"),
    "another authority": (
        lambda _, folder, __: Authority(folder, "other").signer("w1", "w1"),
        "is not of our CA: take one CA for all workers",
    ),
    "an authority that says that it is ours": (
        lambda _, folder, __: Authority(folder, "ca").signer("w1", "w1"),
        "is not of our CA: take one CA for all workers",
    ),
    "expired": (
        lambda ours, _, make: make(ours.issue("w1", "w1", days=(-2, -1))),
        "has expired on .*: renew it; a running worker reads it again",
    ),
    "not yet valid": (
        lambda ours, _, make: make(ours.issue("w1", "w1", days=(1, 2))),
        "is not valid before .*: check the clocks",
    ),
    "another name": (
        lambda ours, *_: ours.signer("w2", "w2", "w3"),
        "is for w2, w3 and not for 'w1': issue one with subjectAltName=DNS:w1",
    ),
    "no name": (lambda ours, *_: ours.signer("w1"), "is for no name and not for 'w1'"),
    "a worker that issues": (
        lambda ours, folder, make: make(
            Authority(folder, "w2", above=ours, is_ca=False).issue("w1", "w1")
        ),
        "none of an authority",
    ),
    "an authority that may not issue": (
        lambda ours, folder, make: make(
            Authority(
                folder, "sub", above=ours, more=(usage(signs=True, issues=False),)
            ).issue("w1", "w1")
        ),
        "none of an authority",
    ),
    "an expired authority": (
        lambda ours, folder, make: make(
            Authority(folder, "sub", above=ours, days=(-3, -2)).issue("w1", "w1")
        ),
        "has expired on",
    ),
    "a chain that is too long": (
        lambda ours, folder, make: make(
            Authority(
                folder, "sub2", above=Authority(folder, "sub", above=ours, length=0)
            ).issue("w1", "w1")
        ),
        "longer than its authority allows",
    ),
    "a purpose": (
        lambda ours, _, make: make(
            ours.issue("w1", "w1", more=(x509.ExtendedKeyUsage([CLIENT]),))
        ),
        "issue it for both",
    ),
    "a key that is not for signatures": (
        lambda ours, _, make: make(
            ours.issue("w1", "w1", more=(usage(signs=False, issues=False),))
        ),
        "not good for signatures",
    ),
    "constraints of names": (
        lambda ours, folder, make: make(
            Authority(
                folder,
                "sub",
                above=ours,
                more=(x509.NameConstraints([x509.DNSName("w2")], None),),
            ).issue("w1", "w1")
        ),
        "extension 2.5.29.30, which farcall does not know",
    ),
    "a short key": (
        lambda ours, _, make: make(
            ours.issue("w1", "w1", key=rsa.generate_private_key(65537, 1024))
        ),
        "is weak",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGERS)
def test_record_that_no_certificate_stands_for_is_ignored_and_named_once(
    authority: Authority,
    tmp_path: Path,
    store: HashStore,
    lines: Callable[[], list[str]],
    unchecked: Callable[[TlsConfig], Signer],
    kind: str,
) -> None:
    make, words = STRANGERS[kind]
    folder = tmp_path / "theirs"
    folder.mkdir()
    stranger = make(authority, folder, unchecked)
    ours = authority.signer("w0", "w0", binds=True)
    join(store, worker("w1", 1), stranger)
    assert re.search(words, refused(store, ours, lines))


def test_a_signature_with_sha_1_is_not_believed(authority: Authority) -> None:
    """Refuse a signature that the library would not make."""
    key = authority.certificate.public_key
    certificate: Any = SimpleNamespace(signature_hash_algorithm=hashes.SHA1(), public_key=key)
    with pytest.raises(chains.NotBelieved, match="is weak"):
        chains._check_strength(certificate)


def test_two_records_that_are_swapped_are_not_there(authority: Authority, store: HashStore) -> None:
    signer = authority.signer("w")  # one for all
    group = join(store, worker("w1", 1), signer)
    join(store, worker("w2", 2), signer)
    values = [raw(store, f"name/{name}") for name in ("w1", "w2")]
    put(store, "name/w1", values[1])
    put(store, "name/w2", values[0])
    assert group.find("w1") is group.find("w2") is None
    copy(store, "name/w2", store, source_prefix="farcall/open", target_prefix="farcall/0")
    assert Rendezvous(store, "farcall/0", signer).find("w1") is None


def test_confirmation_in_the_name_of_another_worker_is_not_there(
    authority: Authority, store: HashStore
) -> None:
    w0, w1 = (authority.signer(name, name, binds=True) for name in ("w0", "w1"))
    board(store, w1).put("confirmed/0", Confirmation("w0", bytes(32)))
    assert board(store, w0).read("confirmed/0", CONFIRMATION).value is None
    board(store, w0).put("confirmed/0", Confirmation("w0", bytes(32)))
    assert board(store, w1).read("confirmed/0", CONFIRMATION).value is not None


def outcomes(store: Store, *signers: Signer) -> list[list[Worker] | Exception]:
    """Let a fixed group of so many workers meet."""
    found: dict[int, list[Worker] | Exception] = {}

    def meet(rank: int) -> None:
        try:
            rendezvous = Rendezvous(store, "farcall/0", signers[rank])
            found[rank] = rendezvous.join(worker(f"w{rank}", rank), len(signers), PATIENCE)
        except RendezvousError as error:
            found[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(len(signers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return [found[rank] for rank in range(len(signers))]


def test_a_fixed_group_forms_by_certificates(authority: Authority, store: HashStore) -> None:
    signers = [authority.signer(f"w{rank}", f"w{rank}", binds=True) for rank in range(3)]
    groups = outcomes(store, *signers)
    assert all(isinstance(group, list) and len(group) == 3 for group in groups), groups


def test_a_fixed_group_of_two_authorities_says_why_it_does_not_form(
    authority: Authority, store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_group, "CLAIM_SECONDS", 0.0)
    for outcome in outcomes(
        store, authority.signer("w0"), Authority(tmp_path, "other").signer("w1")
    ):
        assert isinstance(outcome, RendezvousError)
        assert "can't be believed, since its certificate is not of our CA" in str(outcome)


def test_with_a_secret_beside_the_certificates_both_are_needed(
    authority: Authority, store: HashStore
) -> None:
    secret, other = bytes(32), bytes(range(32))
    own = [authority.issue(f"w{rank}") for rank in range(3)]
    join(store, worker("w0", 0), signer_of(secret, own[0]))
    assert join(store, worker("w1", 1), signer_of(secret, own[1])).find("w0") is not None
    for signer in (signer_of(other, own[2]), signer_of(None, own[2]), signer_of(secret, None)):
        assert Rendezvous(store, "farcall/open", signer).find("w0") is None


@pytest.mark.parametrize("binds", [False, True])
def test_a_dialler_shows_its_name_by_its_certificate(authority: Authority, binds: bool) -> None:
    w0, w1, w2 = (
        MembershipProof("farcall/open", authority.signer(name, name, binds=binds))
        for name in ("w0", "w1", "w2")
    )
    me = Identity("w1", 1, 7)
    assert w0.vouch(w1.shown_by(me)) is None
    assert (w0.vouch(w2.shown_by(me)) is None) is not binds
    assert "not signed with a certificate" in str(w0.vouch(me))
    other = msgspec.structs.replace(w1.shown_by(me), incarnation=8)
    assert "altered since" in str(w0.vouch(other))


def test_each_chain_is_checked_once(
    authority: Authority, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[object] = []

    def check(chain: Any, authorities: Any) -> chains.Validity:
        checked.append(chain)
        return chains.check_chain(chain, authorities)

    w1 = authority.signer("w1")
    join(store, worker("w1", 1), w1)
    monkeypatch.setattr(certificate_signer, "check_chain", check)
    w0 = authority.signer("w0")
    group, membership = Rendezvous(store, "farcall/open", w0), MembershipProof("farcall/open", w0)
    for _ in range(5):
        assert group.find("w1") is not None
        shown = MembershipProof("farcall/open", w1).shown_by(Identity("w1", 1, 7))
        assert membership.vouch(shown) is None
    assert len(checked) == 2  # its own at the start, and that of w1


# --- files that can't be used


def test_a_worker_does_not_start_with_a_certificate_that_others_would_not_believe(
    authority: Authority, tmp_path: Path
) -> None:
    good = authority.issue("good")
    other = Authority(tmp_path, "other")
    locked = tmp_path / "locked.key"
    locked.touch(mode=0o600)
    locked.write_bytes(
        authority.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"x"),
        )
    )
    Path(other.issue("many").cert).write_bytes(Path(good.cert).read_bytes() * 9)
    for config, words in (
        (TlsConfig(good.cert, good.key, str(other.path)), "not of our CA"),
        (TlsConfig(good.cert, other.issue("else").key, good.ca), "does not belong to the cert"),
        (TlsConfig(good.cert, str(locked), good.ca), "has a passphrase"),
        (TlsConfig(str(tmp_path / "many.crt"), good.key, good.ca), "too many others: 9"),
        (authority.issue("half", more=(x509.ExtendedKeyUsage([SERVER]),)), "issue it for both"),
    ):
        with pytest.raises(ValueError, match=words):
            CertificateSigner(config, bytes)


# --- time goes on


def test_a_record_is_believed_until_its_certificate_expires_and_again_when_it_is_renewed(
    authority: Authority,
    store: HashStore,
    clock: Callable[[float], None],
    lines: Callable[[], list[str]],
) -> None:
    me = worker("w1", 1)
    group = join(store, me, authority.signer("w1", "w1", days=(-1, 2)))
    newcomer = Rendezvous(store, "farcall/open", authority.signer("w0", days=(-1, 9)))
    membership = MembershipProof("farcall/open", authority.signer("w2", days=(-1, 9)))
    shows = MembershipProof("farcall/open", group._signer)
    shown = shows.shown_by(Identity("w1", 1, 7))
    assert newcomer.find("w1") is not None
    clock(3)
    assert newcomer.find("w1") is newcomer.find(1) is None
    assert "has expired on" in lines()[0]
    assert "has expired on" in str(membership.vouch(shown))
    with pytest.raises(AuthenticationFailed, match=r"w1\.crt has expired on .*: renew it;"):
        shows.shown_by(Identity("w1", 1, 7))
    assert not group.is_outdated()
    authority.issue("w1", "w1")
    assert membership.vouch(shows.shown_by(Identity("w1", 1, 7))) is None
    assert group.is_outdated()
    assert group.ask(me, "w1") == me
    assert not group.is_outdated()
    assert newcomer.find("w1") == newcomer.find(1) == me


def test_a_worker_that_has_left_does_not_come_back_by_a_new_certificate(
    authority: Authority, store: HashStore
) -> None:
    me = worker("w1", 1)
    group = join(store, me, authority.signer("w1"))
    group.leave(me)
    authority.issue("w1")
    assert group.ask(me, "w1") is None


def take_files(config: TlsConfig, renewed: TlsConfig) -> None:
    """Put renewed files in the place of those of a worker."""
    files = zip(
        (config.cert, config.key, config.ca), (renewed.cert, renewed.key, renewed.ca), strict=True
    )
    for path, other in files:
        Path(path).write_bytes(Path(other).read_bytes())
        os.utime(path, (1, 1))  # the clock of a file system may stand for some milliseconds


@pytest.mark.parametrize("looks", range(6))
def test_a_newcomer_waits_for_a_worker_that_is_about_to_sign_with_a_new_certificate(
    authority: Authority,
    tmp_path: Path,
    store: HashStore,
    monkeypatch: pytest.MonkeyPatch,
    looks: int,
) -> None:
    monkeypatch.setattr(rendezvous, "_RENEWAL_LIMIT", PATIENCE)
    me, newcomer = worker("w1", 1), worker("w2", 2)
    group = join(store, me, authority.signer("w1"))
    new = Authority(tmp_path, "new")
    second = join(store, newcomer, new.signer("w2"))
    take_files(authority.issue("w1"), new.issue("w1"))
    read, so_far = second._board.read, count()

    def look(*args: Any) -> Any:
        if next(so_far) == looks:
            group.ask(me, "w1")
        return read(*args)

    second._board.read = look  # type: ignore[method-assign]
    assert second.ask(newcomer, "w1") == me


def test_a_worker_that_has_signed_with_a_new_certificate_is_in_the_list_of_newcomers(
    authority: Authority, tmp_path: Path, store: HashStore
) -> None:
    me, newcomer = worker("w1", 1), worker("w2", 2)
    group = join(store, me, authority.signer("w1"))
    new = Authority(tmp_path, "new")
    second = join(store, newcomer, new.signer("w2"))
    assert second.roll() == [newcomer]
    take_files(authority.issue("w1"), new.issue("w1"))
    assert group.ask(me, "w1") == me
    assert second.roll() == [me, newcomer]


def test_a_new_certificate_is_noticed_long_before_the_store_is_reminded() -> None:
    asked = threading.Event()
    reminder = Reminder("w1", lambda *_: asked.set(), lambda: True)
    reminder.start()
    assert asked.wait(PATIENCE)
    reminder.end()
