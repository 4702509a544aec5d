"""Real processes and sockets around a fake engine: every way a worker begins and ends.

On uvloop, as the server runs; the tests of residency use asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from penstock.errors import BadRequest, InternalError, Overloaded, WorkerLost
from penstock.memory.readings.control_group import worker_group
from penstock.memory.readings.gauge import memory_groups
from penstock.server.processes import fork_server_client as template
from penstock.server.processes import output_log
from penstock.server.processes.fork_launcher import ForkLauncher
from penstock.server.processes.fork_server_client import WORKER_ENVIRONMENT, ForkServerProcess
from penstock.server.processes.supervisor import Supervisor, WorkerHandle
from penstock.testing.fake_worker import FAKE_PRELOAD, FakeModel
from penstock.wire import LoadSpec, Sampling, Status, Submit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LONG = 1 << 30


def spec(folder: Path, model: FakeModel | None = None, name: str = "fake") -> LoadSpec:
    (model or FakeModel()).write(folder)
    return LoadSpec(name, str(folder), "cpu", "float32", memory_bytes=1 << 20)


def request(max_tokens: int = LONG) -> Submit:
    return Submit(id=0, prompt=[5, 6, 7], max_tokens=max_tokens, sampling=Sampling())


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie that waits for its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(*pids: int) -> None:
    """Fails by the suite's patience, not by a measured time."""
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {list(filter(is_running, pids))}"
        time.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that a message from another process brings about."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - there is no event for every attribute
            await asyncio.sleep(0.001)


def entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def environment(pid: int) -> set[str]:
    """NAME=VALUE each, cut at colons: glibc writes an end behind each of its own settings where it
    reads them."""
    return {*Path(f"/proc/{pid}/environ").read_text().replace("\0", ":").split(":")}


def status(worker: WorkerHandle) -> Status:
    assert worker.client.status is not None
    return worker.client.status


async def fork_server(supervisor: Supervisor) -> ForkServerProcess:
    assert isinstance(supervisor.launcher, ForkLauncher)
    return await supervisor.launcher.fork_server()


@contextlib.asynccontextmanager
async def fake_supervisor(home: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(
        home,
        ForkLauncher(home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD),
    )
    try:
        yield supervisor
    finally:
        template = (await fork_server(supervisor)).pid
        await supervisor.close()
        wait_until_gone(template)


async def answer(worker: WorkerHandle, max_tokens: int) -> list[int]:
    async with worker.client.generate(request(max_tokens)) as outputs:
        return [token async for output in outputs for token in output.tokens]


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_a_worker_loads_answers_and_stops(
    tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m"))
            ready = await worker.ready
            assert ready.pid == worker.pid != os.getpid()
            assert ready.load_s > 0
            assert worker.client.ready == ready
            assert worker.progress is not None
            assert worker.progress.done_bytes == worker.progress.total_bytes
            assert await answer(worker, 5) == [5, 6, 7, 5, 6]
            await worker.client.probe(10)
            await worker.stop()
            assert (await worker.ended).words == "it exited with code 0"
            assert not is_running(worker.pid)
            assert not worker.alive

    run(scenario())
    assert not list(tmp_path.rglob("*.sock"))


def test_two_workers_do_not_know_of_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            slow = FakeModel(step_s=0.002)
            first = await supervisor.start(spec(tmp_path / "a", slow, name="org/a:1"))
            second = await supervisor.start(spec(tmp_path / "b", slow, name="b"))
            tasks = [asyncio.create_task(answer(w, 40)) for w in (first, second, first)]
            os.kill(second.pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results[0] == results[2] == [5, 6, 7] * 13 + [5]
            assert isinstance(results[1], WorkerLost)
            assert first.alive

    uvloop.run(scenario())


def test_a_killed_worker_ends_its_streams_with_the_cause(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m", FakeModel(step_s=0.001)))
            await worker.ready
            outputs = worker.client.generate(request())
            assert (await anext(outputs)).tokens[0] == 5
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(WorkerLost, match="killed by SIGKILL"):
                async for _ in outputs:
                    pass
            assert "SIGKILL" in (await worker.ended).words

    uvloop.run(scenario())


def test_a_burial_does_not_wait_for_the_threads_of_requests(tmp_path: Path) -> None:
    over = threading.Event()

    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m"))
            await worker.ready
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1))
            costly = loop.run_in_executor(None, over.wait)
            os.kill(worker.pid, signal.SIGKILL)
            try:
                async with asyncio.timeout(10):
                    await asyncio.shield(worker.ended)
            finally:
                over.set()
                await costly

    uvloop.run(scenario())


def test_a_crash_leaves_its_last_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m"))
            await worker.ready
            os.kill(worker.pid, signal.SIGSEGV)  # faulthandler writes the stack to the log
            assert (await worker.ended).words == "it was killed by SIGSEGV"

    uvloop.run(scenario())
    assert "Segmentation fault" in caplog.text
    assert "loop.py" in (tmp_path / "logs" / "fake.log").read_text()


@pytest.mark.parametrize(
    "behaviour", [FakeModel(load_s=3600), FakeModel(hang_at_token=1)], ids=["load", "step"]
)
def test_a_worker_whose_server_is_gone_exits_whatever_it_does(
    tmp_path: Path, behaviour: FakeModel
) -> None:
    spec(tmp_path / "m", behaviour)
    program = textwrap.dedent(
        f"""
        import asyncio, pathlib
        from penstock.server.processes.fork_launcher import ForkLauncher
        from penstock.server.processes.supervisor import Supervisor
        from penstock.testing.fake_worker import FAKE_PRELOAD
        from penstock.wire import LoadSpec, Sampling, Submit

        async def main():
            home = pathlib.Path({str(tmp_path)!r})
            launcher = ForkLauncher(
                home, engine_module="penstock.testing.fake_worker", preload=FAKE_PRELOAD
            )
            supervisor = Supervisor(home, launcher)
            worker = await supervisor.start(
                LoadSpec("m", str(home / "m"), "cpu", "float32", memory_bytes=1 << 20)
            )
            if {behaviour.load_s} == 0:
                await worker.ready
                outputs = worker.client.generate(Submit(0, [1], 9, Sampling()))
                await anext(outputs)
            print(await supervisor.launcher.started(), worker.pid, flush=True)
            await asyncio.sleep(3600)

        asyncio.run(main())
        """
    )
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with server:
        assert server.stdout is not None
        pids = [int(word) for word in server.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        server.kill()
    wait_until_gone(*pids)


def test_a_load_is_stopped_without_waiting_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m", FakeModel(load_s=3600)))
            await worker.stop(grace_s=60)
            assert (await worker.ended).words == "it exited with code 0"
            with pytest.raises(WorkerLost, match="unloaded"):
                await worker.ready

    uvloop.run(scenario())


def test_sigterm_ends_a_load_and_sigint_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            template = await fork_server(supervisor)
            worker = await supervisor.start(spec(tmp_path / "m", FakeModel(load_s=3600)))
            await until(lambda: worker.progress is not None)
            for pid in (template.pid, worker.pid):
                os.kill(pid, signal.SIGINT)
            os.kill(template.pid, signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert worker.alive
            assert template.alive
            os.kill(worker.pid, signal.SIGTERM)
            with pytest.raises(WorkerLost, match="SIGTERM"):
                await worker.ready

    uvloop.run(scenario())


def test_a_worker_that_hangs_is_made_to_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m", FakeModel(hang_at_token=1)))
            await worker.ready
            outputs = worker.client.generate(request())
            await anext(outputs)
            await asyncio.sleep(0.1)  # it hangs right after the first token
            with pytest.raises(TimeoutError):
                await worker.client.probe(0.05)
            await worker.stop(grace_s=0.05)
            assert "SIGTERM" in (await worker.ended).words
            with pytest.raises(WorkerLost, match="unloaded"):
                await anext(outputs)

    uvloop.run(scenario())


def test_a_refused_load_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            refused = FakeModel(load_error_code=Overloaded.code)
            worker = await supervisor.start(spec(tmp_path / "m", refused))
            with pytest.raises(Overloaded, match="refuses to load"):
                await worker.ready
            assert (await worker.ended).words == "it exited with code 3"

            worker = await supervisor.start(spec(tmp_path / "n", FakeModel(load_bug=True)))
            with pytest.raises(BadRequest, match="RuntimeError: a bug in the loader"):
                await worker.ready
            await worker.ended
            assert "Traceback" in (tmp_path / "logs" / "fake.log").read_text()

    uvloop.run(scenario())


def test_a_failed_step_ends_its_requests_and_the_third_in_a_row_the_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m", FakeModel(failing_steps=2)))
            await worker.ready
            for _ in range(2):
                with pytest.raises(InternalError, match="step of the model failed"):
                    await answer(worker, 3)
            assert await answer(worker, 3) == [5, 6, 7]
            assert worker.alive

            broken = await supervisor.start(spec(tmp_path / "n", FakeModel(failing_steps=9)))
            await broken.ready
            for _ in range(3):
                with pytest.raises(InternalError):
                    await answer(broken, 3)
            assert (await broken.ended).words == "it exited with code 4"

    uvloop.run(scenario())


def test_cancel_reaches_the_worker_within_a_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m", FakeModel(step_s=0.02)))
            await worker.ready
            async with worker.client.generate(request()) as outputs:
                await anext(outputs)
                before = status(worker)
            await until(lambda: status(worker).running == 0)
            # The step in hand when the message arrives, and one that was already on its way.
            assert status(worker).steps <= before.steps + 2

    uvloop.run(scenario())


def test_the_template_is_replaced_after_its_death_and_its_workers_live_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            first = await supervisor.start(spec(tmp_path / "m"))
            await first.ready
            template = await fork_server(supervisor)
            os.kill(template.pid, signal.SIGKILL)
            await until(lambda: not template.alive)
            assert supervisor.launcher.process() is None
            supervisor.launcher.warm()
            await until(lambda: supervisor.launcher.process() is not None)
            born = supervisor.launcher.process()
            second = await supervisor.start(spec(tmp_path / "m"))
            await second.ready
            assert await answer(first, 3) == [5, 6, 7]
            assert (await fork_server(supervisor)).pid != template.pid
            # Its memory is ours while it still imports, so it is known from its birth on.
            assert born is not None
            assert supervisor.launcher.process() == (born[0], True)
            await first.stop()
            assert "unknown" in (await first.ended).words
            wait_until_gone(first.pid)

    uvloop.run(scenario())


def test_a_template_that_is_stopped_is_replaced_and_its_workers_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "FORK_TIMEOUT_S", 3.0)

    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            first = await supervisor.start(spec(tmp_path / "m"))
            await first.ready
            stopped = (await fork_server(supervisor)).pid
            os.kill(stopped, signal.SIGSTOP)
            async with asyncio.timeout(60):
                second = await supervisor.start(spec(tmp_path / "m"))
                await second.ready
            assert (await fork_server(supervisor)).pid != stopped
            wait_until_gone(stopped)
            for worker in (first, second):
                assert await answer(worker, 3) == [5, 6, 7]
                await worker.stop()

    uvloop.run(scenario())


def test_a_template_that_is_stopped_while_it_starts_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "START_IDLE_S", 1.0)
    monkeypatch.setattr(template, "_LOOK_S", 0.1)
    monkeypatch.setattr(template, "STOP_TIMEOUT_S", 0.5)

    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            supervisor.launcher.warm()
            await until(lambda: supervisor.launcher.process() is not None)
            found = supervisor.launcher.process()
            assert found is not None
            os.kill(found[0], signal.SIGSTOP)
            async with asyncio.timeout(60):
                assert (await fork_server(supervisor)).pid != found[0]
            wait_until_gone(found[0])

    uvloop.run(scenario())


def test_a_template_that_others_leave_no_processor_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "START_IDLE_S", 0.0)
    monkeypatch.setattr(template, "_LOOK_S", 0.01)
    monkeypatch.setattr(template, "read_cpu_s", lambda pid: 0.0)
    monkeypatch.setattr(template, "wants_to_run", lambda pid: True)

    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            assert await fork_server(supervisor)

    uvloop.run(scenario())


def test_a_template_that_waits_for_a_compiler_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "START_IDLE_S", 1.0)
    monkeypatch.setattr(template, "_LOOK_S", 0.1)

    async def scenario() -> None:
        launcher = ForkLauncher(tmp_path, preload=("compiling_preload",))
        supervisor = Supervisor(tmp_path, launcher)
        try:
            up = (await fork_server(supervisor)).up
            assert up is not None
            assert up.import_s > 3
        finally:
            await supervisor.close()

    uvloop.run(scenario())


def test_a_template_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(template, "START_TIMEOUT_S", 0.0)
        supervisor = Supervisor(tmp_path, ForkLauncher(tmp_path, preload=FAKE_PRELOAD))
        with pytest.raises(InternalError, match="had not finished its imports after 0 s"):
            await fork_server(supervisor)
        assert supervisor.launcher.process() is None
        await supervisor.close()

    uvloop.run(scenario())


def test_a_template_that_cannot_import_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(
            tmp_path, ForkLauncher(tmp_path, preload=("penstock.no_such_module",))
        )
        supervisor.launcher.warm()
        for _ in range(2):
            with pytest.raises(InternalError, match=r"No module named 'penstock\.no_such_module'"):
                await supervisor.start(spec(tmp_path / "m"))
        await supervisor.close()

    uvloop.run(scenario())
    assert "the fork server did not start" in caplog.text


def test_the_environment_is_the_workers_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "m"))
            await worker.ready
            for name, value in WORKER_ENVIRONMENT.items():
                assert {*f"{name}={value}".split(":")} <= environment(worker.pid)

    before = dict(os.environ)
    uvloop.run(scenario())
    assert dict(os.environ) == before


def test_twenty_lives_leave_nothing_behind(tmp_path: Path) -> None:
    async def scenario(lives: int) -> None:
        async with fake_supervisor(tmp_path) as supervisor:
            template = await fork_server(supervisor)
            ours: list[int] = []
            theirs: list[int] = []
            for _ in range(lives):
                worker = await supervisor.start(spec(tmp_path / "m"))
                await worker.ready
                await worker.stop()
                ours.append(entries("/proc/self/fd"))
                theirs.append(entries(f"/proc/{template.pid}/fd"))
            assert ours[0] == ours[-1]
            assert theirs[0] == theirs[-1]
            assert children(template.pid) == []

    uvloop.run(scenario(20))
    # Other tests of this process may open or close a few; a leak would be one a supervisor.
    gc.collect()
    before = entries("/proc/self/fd")
    for _ in range(6):
        uvloop.run(scenario(1))
    gc.collect()
    assert entries("/proc/self/fd") < before + 6


def test_a_log_is_bounded_and_keeps_its_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_log, "MAX_FILE_BYTES", 1000)

    async def scenario() -> None:
        log = output_log.OutputLog(tmp_path / "x.log")
        for number in range(500):
            os.write(log.write_fd, b"line %d\n" % number)
            await asyncio.sleep(0)
        assert log.tail().splitlines()[-1] == "line 499"
        assert len(log.tail().splitlines()) == output_log.TAIL_LINES
        log.close()

    uvloop.run(scenario())
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept in (["x.log", "x.log.1"], ["x.log.1"])
    assert all(path.stat().st_size < 5000 for path in tmp_path.iterdir())


def test_the_real_template_has_one_thread_and_its_forks_can_use_torch(tmp_path: Path) -> None:
    async def scenario() -> None:
        # The probe module beside this file takes the place of an engine.
        supervisor = Supervisor(tmp_path, ForkLauncher(tmp_path, engine_module="fork_probe"))
        try:
            template = await fork_server(supervisor)
            assert template.up is not None
            assert template.up.threads == 1
            assert entries(f"/proc/{template.pid}/task") == 1
            worker = await supervisor.start(spec(tmp_path / "m"))
            with pytest.raises(Overloaded, match="bad_fork=False threads_before=2 sum=4096"):
                await worker.ready
        finally:
            await supervisor.close()

    uvloop.run(scenario())


@pytest.mark.parametrize("moment", ["while it loads", "once it serves"])
def test_the_control_group_of_a_dead_worker_is_removed(tmp_path: Path, moment: str) -> None:
    """The group is made here as a worker makes its own: the fake engine has no cap to set."""

    async def scenario() -> None:
        model = FakeModel(load_s=30.0 if moment == "while it loads" else 0.0)
        async with fake_supervisor(tmp_path) as supervisor:
            worker = await supervisor.start(spec(tmp_path / "model", model))
            if moment == "once it serves":
                await worker.ready
            parent, (limit_file, _) = next(memory_groups())
            group = worker_group(parent, worker.pid)
            try:
                group.mkdir()
                (group / "cgroup.procs").write_text(str(worker.pid))
            except OSError:
                pytest.skip("no control group can be made here")
            assert (group / limit_file).exists()
            worker.kill(signal.SIGKILL)
            await worker.ended
            assert not group.exists()

    uvloop.run(scenario())
