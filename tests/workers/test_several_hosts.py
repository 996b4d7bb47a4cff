"""Two network and process namespaces joined by a cable: the workers find, use and lose each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.netns

HERE, THERE = "10.231.77.1", "10.231.77.2"
PORT = 29571


class TwoHosts:
    """Two network namespaces, a veth pair between them, and the processes that were started in them."""

    def __init__(self) -> None:
        self.names = tuple(f"unikv{os.getpid()}{end}" for end in "ab")
        self._stack = ExitStack()
        for name in self.names:
            ip("netns", "add", name)
            self._stack.callback(ip, "netns", "del", name)
        first, second = self.names
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self.names, (HERE, THERE), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")

    def start(self, host: int, *words: str, apart: bool = True, module: str = "workers") -> subprocess.Popen[str]:
        """Start `python -m module words` on a host; with `apart` in a process namespace of its own."""
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if apart else []
        command = ["ip", "netns", "exec", self.names[host], *unshare, sys.executable, "-m", module, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._stack.callback(end, process)
        return process

    def cut(self) -> None:
        """Take the cable away, in silence: neither end is told."""
        ip("-n", self.names[0], "link", "set", "cable", "down")

    def mend(self) -> None:
        """Put the cable back."""
        ip("-n", self.names[0], "link", "set", "cable", "up")

    def slow_down(self, rate: str, delay: str) -> str:
        """Limit what leaves either host, and delay it where this kernel can; return how."""
        ways = (["netem", "delay", delay, "rate", rate], ["tbf", "rate", rate, "burst", "128kb", "latency", "200ms"])
        for way in ways:
            commands = [["tc", "-n", name, "qdisc", "replace", "dev", "cable", "root", *way] for name in self.names]
            if all(subprocess.run(words, capture_output=True, check=False).returncode == 0 for words in commands):
                return way[0]
        pytest.skip("this kernel shapes no traffic")

    def close(self) -> None:
        self._stack.close()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare")
    probe = f"unikvprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    ip("netns", "del", probe)
    two = TwoHosts()
    yield two
    two.close()


def start_workers(hosts: TwoHosts, pair: str, *extra: str, apart: bool = True) -> list[subprocess.Popen[str]]:
    """Start one worker on each host by hand; the context worker hosts the rendezvous."""
    words = ["--rank", "0", "--rendezvous", f"tcp://{HERE}:{PORT}", *extra]
    return [
        hosts.start(0, "worker", pair, "--side", "context", *words, "--serve-rendezvous", apart=apart),
        hosts.start(1, "worker", pair, "--side", "generation", *words, apart=apart),
    ]


def bench(hosts: TwoHosts, pair: str, result: Path, *extra: str) -> tuple[int, str, dict[str, Any]]:
    """Drive the workers from the first host; return exit code, output and result."""
    words = ["bench", pair, "--rendezvous", f"tcp://{HERE}:{PORT}", "--json", str(result), *extra]
    process = hosts.start(0, *words)
    output = process.communicate(timeout=60)[0]
    return process.returncode, output, json.loads(result.read_text()) if result.exists() else {}


def test_workers_on_two_hosts_move_every_byte_and_again_for_the_next_caller(
    hosts: TwoHosts, write_pair: Callable[..., str], tmp_path: Path
) -> None:
    pair = write_pair(transfer__path="auto")
    start_workers(hosts, pair)
    for run in range(2):
        code, output, result = bench(hosts, pair, tmp_path / f"{run}.json")
        assert code == 0, output
        assert result["summary"]["verified"] == 4 and result["summary"]["mismatched_bytes"] == 0
        [path] = result["path"]
        assert path["path"] == "zmq" and "process namespaces" in path["reason"]


def test_memory_counts_and_not_the_network(hosts: TwoHosts, write_pair: Callable[..., str], tmp_path: Path) -> None:
    pair = write_pair(transfer__path="auto")
    start_workers(hosts, pair, apart=False)
    code, output, result = bench(hosts, pair, tmp_path / "result.json")
    assert code == 0, output
    assert [path["path"] for path in result["path"]] == ["direct"]


def test_direct_between_hosts_is_refused_at_start(hosts: TwoHosts, write_pair: Callable[..., str]) -> None:
    _, generation = start_workers(hosts, write_pair(transfer__path="direct"))
    output = generation.communicate(timeout=60)[0]
    assert "different process namespaces" in output and "transfer.path: auto or zmq" in output


def test_torchrun_on_both_hosts(hosts: TwoHosts, write_pair: Callable[..., str], tmp_path: Path) -> None:
    pair = write_pair(transfer__path="auto")
    for host in (0, 1):
        words = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host)]
        words += ["--master-addr", HERE, "--master-port", str(PORT), "-m", "workers", "worker", pair]
        hosts.start(host, *words, module="torch.distributed.run")
    code, output, result = bench(hosts, pair, tmp_path / "result.json")
    assert code == 0, output
    assert result["summary"]["verified"] == 4


def test_a_cut_cable_fails_what_was_under_way_with_a_reason(
    hosts: TwoHosts, write_pair: Callable[..., str], tmp_path: Path
) -> None:
    pair = write_pair(
        transfer__path="auto",
        transfer__peer_silence_s=1.5,
        transfer__timeout_s=5,
        workload={"requests": 5000, "prompt_tokens": [100, 100], "output_tokens": 1, "concurrency": 4},
    )
    workers = start_workers(hosts, pair)
    words = ["bench", pair, "--rendezvous", f"tcp://{HERE}:{PORT}", "--json", str(tmp_path / "result.json")]
    caller = hosts.start(0, *words)
    assert caller.stdout is not None
    wait_for_traffic(hosts)
    hosts.cut()
    cut_s = time.monotonic()
    output = caller.communicate(timeout=60)[0]
    assert caller.returncode == 1 and time.monotonic() - cut_s < 20.0
    result = json.loads((tmp_path / "result.json").read_text())
    failed = [request for request in result["requests"] if request["error"]]
    assert failed and all(request["verified"] != bool(request["error"]) for request in result["requests"]), output
    assert any("gone" in request["error"] for request in failed)
    for worker in workers:
        worker.kill()
        assert "is gone: the connection is lost" in worker.communicate()[0]
    hosts.mend()
    pair = write_pair(transfer__path="auto")
    start_workers(hosts, pair)
    code, output, result = bench(hosts, pair, tmp_path / "again.json")
    assert code == 0 and result["summary"]["verified"] == 4, output


RATE_BYTES_S = 25_000_000
WIDE: dict[str, Any] = {
    "model__max_seq_len": 4096,
    "model__layers": [{"count": 2, "owner": "target", "kv_heads": 8, "head_dim": 64, "dtype": "float16"}],
    "speculative": None,
    "context__pool": {"pages": 1500},
    "generation__pool": {"pages": 1500},
    "workload": {"requests": 8, "prompt_tokens": [2000, 2000], "output_tokens": 1, "concurrency": 4},
}
"""Requests of 8 MB: a slow cable takes a third of a second for each."""


def test_a_slow_cable_is_kept_full(hosts: TwoHosts, write_pair: Callable[..., str], tmp_path: Path) -> None:
    pair = write_pair(transfer__path="zmq", **WIDE)
    hosts.slow_down("200mbit", "20ms")
    start_workers(hosts, pair)
    code, output, result = bench(hosts, pair, tmp_path / "result.json")
    assert code == 0, output
    assert result["summary"]["verified"] == 8
    moved = sum(request["bytes"] for request in result["requests"])
    busy_s = sum(request["stages"]["move_s"] for request in result["requests"])  # one move after the other
    print(f"{moved / busy_s / RATE_BYTES_S:.2f} of the cable's rate")
    assert moved / busy_s > 0.6 * RATE_BYTES_S


def wait_for_traffic(hosts: TwoHosts) -> None:
    """Wait until pages cross the cable."""
    command = ["ip", "netns", "exec", hosts.names[1], "cat", "/sys/class/net/cable/statistics/rx_bytes"]
    give_up_s = time.monotonic() + 60
    while int(subprocess.run(command, capture_output=True, check=True, text=True).stdout) < 1_000_000:
        assert time.monotonic() < give_up_s, "nothing moves"
