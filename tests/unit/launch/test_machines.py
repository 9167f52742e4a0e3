"""Launchers of several machines find each other and are notified of each other's end; here as threads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.launch import machines, rendezvous
from llmsuite.launch.ends import End
from llmsuite.launch.launch import launch
from llmsuite.launch.machines import Machines, free_ports

DEAD = End(1, "rank 5 on machine 2 was killed by SIGKILL; its log: workerlog.5", killed=True)


@pytest.fixture
def master() -> str:
    return f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"


def _meet(launchers: list[Machines]) -> list[list[str]]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [f.result(20) for f in [pool.submit(m.connect, 2) for m in launchers]]


@pytest.fixture
def three(master: str) -> Iterator[list[Machines]]:
    launchers = [Machines(index, 3, master, "run") for index in range(3)]
    _meet(launchers)
    yield launchers
    for launcher in launchers:
        launcher.close()


def _poll_all(launchers: list[Machines]) -> list[End | None]:
    """The end that each launcher knows of, after enough polls to forward it."""
    for _ in range(5):
        ends = [launcher.poll() for launcher in launchers]
        time.sleep(0.02)
    return ends


def test_launchers_agree_on_the_endpoints_of_ranks(master: str) -> None:
    launchers = [Machines(index, 3, master, "run") for index in (2, 0, 1)]
    found = _meet(launchers)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 7  # a store and six ranks
    assert all(endpoint.startswith("127.0.0.1:") for endpoint in found[0])
    for launcher in launchers:
        launcher.close()


def test_a_single_machine_has_no_others() -> None:
    alone = Machines()
    assert len(alone.connect(4)) == 5
    alone.announce(DEAD)
    assert alone.poll() is None
    assert alone.all_ended


def test_without_a_failure_nothing_is_reported(three: list[Machines]) -> None:
    assert _poll_all(three) == [None] * 3
    assert not three[0].all_ended
    for launcher in three[1:]:
        launcher.announce(End(0, ""))
        launcher.close()  # after its announcement it may leave
    assert _poll_all(three[:1]) == [None]
    assert three[0].all_ended


def test_a_failure_reaches_all(three: list[Machines]) -> None:
    three[2].announce(DEAD)
    assert _poll_all(three[:2]) == [DEAD, DEAD]


def test_a_killed_rank_is_reported_before_ranks_that_failed_because_of_it(three: list[Machines]) -> None:
    three[1].announce(End(1, "rank 2 on machine 1 ended with exit code 1"))
    three[2].announce(DEAD)
    assert _poll_all(three[:1]) == [DEAD]


def test_the_loss_of_a_machine_reaches_all(three: list[Machines]) -> None:
    three[1].close()
    assert _poll_all([three[0], three[2]]) == [End(1, "machine 1 is lost", killed=True, of_machine=True)] * 2


def test_a_rank_that_fails_for_a_lost_machine_is_not_blamed(master: str, tmp_path: Path) -> None:
    output: list[str] = []
    other = Machines(1, 2, master, "run")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lost = pool.submit(lambda: (other.connect(1), time.sleep(1), other.close()))
        own = Machines(0, 2, master, "run")
        code = launch(["sh", "-c", "exit 7"], 1, tmp_path, lambda local: {}, output.append, own)
        lost.result(20)
    assert (code, "".join(output)) == (1, "machine 1 is lost\n")


def test_a_machine_that_does_not_answer_reaches_all(three: list[Machines], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "SILENT_SECONDS", 1.0)
    deadline = time.monotonic() + 20
    while (end := three[0].poll()) is None and time.monotonic() < deadline:
        three[2].poll()  # machine 1 says nothing
        time.sleep(0.05)
    assert end == End(1, "machine 1 does not answer", killed=True, of_machine=True)
    assert _poll_all([three[0], three[2]]) == [end, end]


@pytest.mark.parametrize(
    ("index", "run", "message"),
    [
        (1, "other", "machine 1 was given another recipe or other overrides than machine 0"),
        (2, "run", "two machines were started with --launch.node_rank=2"),
    ],
)
@pytest.mark.parametrize("key", ["", "a secret"])
def test_a_machine_that_cannot_take_part_gets_the_reason(
    master: str, index: int, run: str, message: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rendezvous.KEY, key)
    if not key:  # without a key it may be another program: machine 0 waits for the real one
        monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 3.0)
    pair = [Machines(0, 2, master, "run"), Machines(index, 2, master, run)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for found in [pool.submit(m.connect, 2) for m in pair]:
            with pytest.raises(UserError, match=message):
                found.result(20)


@pytest.mark.parametrize(
    ("theirs", "names"),
    [
        ("stage=0 seed=1 train=2", ""),
        ("stage=0 seed=3 train=4", "seed, train"),
        ("stage=5 seed=1 train=2 dpo=6", "stage"),
        ("x", ""),
    ],
)
def test_the_sections_that_differ_are_named(theirs: str, names: str) -> None:
    assert rendezvous.differing_sections("stage=0 seed=1 train=2", theirs) == names


def test_an_address_that_is_not_of_machine_0_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"machine 0 cannot listen at {address}: .*; it has to be a free port"):
            Machines(0, 2, address, "run").connect(2)
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 0.5)
    with pytest.raises(UserError, match=f"launch.master: there is no answer at {address}"):
        Machines(1, 2, address, "run").connect(2)
    with pytest.raises(UserError, match=r"machines \[1\] did not connect to"):
        Machines(0, 2, address, "run").connect(2)


def test_a_name_that_is_machine_0s_own_loopback_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of Debian's /etc/hosts: "127.0.1.1 HOST0". The others use its address in their network."""
    port = free_ports("127.0.0.1", 1)[0]
    monkeypatch.setattr(socket, "gethostbyname", {"HOST0": "127.0.1.1", "HOST1": "10.0.0.1"}.__getitem__)
    assert machines._listening_address("HOST0") == ""  # at all addresses
    assert machines._listening_address("HOST1") == "HOST1"
    assert [machines._listening_address(name) for name in ("localhost", "127.0.0.1")] == ["localhost", "127.0.0.1"]
    # this machine's only other address stands for the network: 127.0.0.5 is not what the name of machine 0 stands for
    monkeypatch.setattr(machines, "_is_loopback", lambda address: address == "127.0.1.1")
    # one launcher more is on machine 0 itself, and reaches it where no other machine does
    names = ("HOST0", "127.0.1.1", "127.0.0.5")
    launchers = [Machines(number, 3, f"{name}:{port}", "run") for number, name in enumerate(names)]
    found = _meet(launchers)
    assert found[0] == found[1] == found[2]
    assert [endpoint.split(":")[0] for endpoint in found[0][:3]] == ["127.0.0.5"] * 3  # the store, and its ranks
    for launcher in launchers:
        launcher.close()


OTHER_CLIENTS = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"[1]\n",
    b"{}\n",
    b'{"machine": 1}\n',
    b'{"machine": 1, "run": "run", "endpoints": ["a:1", "a:2"], "nonce": "x", "proof": "y"}\n',
    b'{"machine": 1, "run": 5, "endpoints": ["a:1"], "nonce": "x"}\n',
    b'{"machine": true, "run": "other", "endpoints": [], "nonce": "x"}\n',
    b'{"machine": 1, "ru',
    b"\xff\n",
    b"[" * 100_000 + b"\n",
    b"x" * (2 << 20),
]


def test_other_clients_do_not_block_the_rendezvous(
    master: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PROGRESS_SECONDS", 0.1)
    before = set(threading.enumerate())
    first = Machines(0, 2, master, "run")
    second = Machines(1, 2, master, "run")
    host, port = machines._address(master)
    opened = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(first.connect, 2)
        for output in OTHER_CLIENTS:
            while True:
                try:
                    opened.append(socket.create_connection((host, port)))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
            opened[-1].settimeout(1)
            with contextlib.suppress(OSError):  # it is closed in the middle
                opened[-1].sendall(output)
        found = pool.submit(second.connect, 2)
        assert waiting.result(60) == found.result(60)
    for connection in (first, second, *opened):
        connection.close()
    printed = capsys.readouterr().err
    assert f"waiting for machines [1] to connect to {master}" in printed
    assert f"a machine was given another {rendezvous.KEY} than machine 0" in printed
    assert set(threading.enumerate()) <= before, "a fork would have none of them"


def test_waiting_for_machine_0_is_reported_repeatedly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "HANDSHAKE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = [f"127.0.0.1:{silent.getsockname()[1]}", "no-such-host.invalid:29500"]
        for place in places:
            with pytest.raises(UserError, match=f"there is no answer at {place}"):
                Machines(1, 2, place, "run").connect(2)
            lines = capsys.readouterr().err.splitlines()
            assert lines[0] == f"waiting for machine 0 at {place}"
            assert len(lines) > 1


def test_a_secret_that_differs_is_named(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 2.0)
    first = Machines(0, 2, master, "run")
    second = Machines(1, 2, master, "run")
    proof = rendezvous._proof

    def other(nonce: str, message: Any) -> str:
        return proof(nonce + "another key" * ("machine" in message), message)

    monkeypatch.setattr(rendezvous, "_is_proven", lambda nonce, message: message["proof"] == proof(nonce, message))
    monkeypatch.setattr(rendezvous, "_proof", other)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for found in [pool.submit(m.connect, 2) for m in (first, second)]:
            with pytest.raises(UserError, match=f"a machine was given another {rendezvous.KEY} than machine 0"):
                found.result(20)


def test_a_machine_that_was_started_again_takes_its_place(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 20.0)
    host, port = machines._address(master)
    first = Machines(0, 3, master, "run")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        complete = pool.submit(first.connect, 1)

        def dies() -> None:
            peer = rendezvous.Peer(socket.create_connection((host, port)))
            greeting = peer.wait(20)
            assert greeting is not None
            hello = {"machine": 1, "run": "run", "endpoints": ["127.0.0.1:9"], "nonce": "x"}
            peer.send({**hello, "proof": rendezvous._proof(greeting["llmsuite"], hello)})
            time.sleep(0.5)
            peer.socket.close()

        while True:
            try:
                dies()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        others = [Machines(index, 3, master, "run") for index in (2, 1)]
        found = [pool.submit(others[0].connect, 1)]
        time.sleep(1.0)  # a machine that has disconnected does not count
        found.append(pool.submit(others[1].connect, 1))
        assert all(future.result(30) == complete.result(30) for future in found)
        assert "127.0.0.1:9" not in complete.result()
    for launcher in (first, *others):
        launcher.close()
