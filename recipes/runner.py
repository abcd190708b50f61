"""Runs of a grid done one after the other or side by side, each in a process, each by one bench alone."""

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .command import UsageError
from .grid import ARM, Grid, Run
from .runs import (
    LOCK,
    LOG,
    State,
    command,
    drop_big_files,
    last_lines,
    outlives,
    resumption,
    search_path,
    state,
    write_record,
)

# A lock that nobody has touched for so long is of a machine that is gone. Every bench has to agree on it.
LEASE = 60.0
POLL = 0.2
GRACE = 20.0  # seconds between asking a run to stop and stopping it
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class Job:
    """A run that is being done."""

    run: Run
    folder: Path
    slot: int
    lock: Any
    process: subprocess.Popen[bytes]
    record: dict[str, Any]
    began: float = field(default_factory=time.monotonic)


class Runner:
    """Does what is open of a grid.

    A run is done under a lock in its folder, so that several benches on one folder, on several machines of a shared file
    system too, share the grid out among themselves. A lock is refreshed while its bench lives; one whose process is gone,
    or that has not been refreshed for `lease` seconds, is taken over.

    Args:
        grid: Says how a run is started.
        runs: Those to do, in this order.
        root: Folder of their folders.
        jobs: How many at once.
        threads: Threads of each; None for the machine's cores divided among them, or what OMP_NUM_THREADS says.
        gpus: CUDA devices, one for each run at once; () leaves CUDA_VISIBLE_DEVICES alone.
        changed: "rerun" or "keep" for runs that were finished with other flags than the grid's.
        skip_failed: Leave out the runs that failed before.
        keep: The grid's `keep`.
        say: Takes each line of progress.
        watch: Called several times a second, to draw a bar.
        lease: See above; benches on one folder must agree on it.
    """

    def __init__(
        self,
        grid: Grid,
        runs: Sequence[Run],
        root: Path,
        *,
        jobs: int = 1,
        threads: int | None = None,
        gpus: Sequence[str] = (),
        changed: str = "keep",
        skip_failed: bool = False,
        keep: str = "all",
        say: Callable[[str], None] = print,
        watch: Callable[["Runner"], None] = lambda runner: None,
        lease: float = LEASE,
    ) -> None:
        self.grid, self.runs, self.root = grid, list(runs), root
        self.jobs, self.gpus, self.changed, self.keep, self.lease = jobs, gpus, changed, keep, lease
        self.say, self.watch = say, watch
        self.environment = self._environment(threads)
        self.states = {run.name: self._state(run) for run in self.runs}
        self.outcome = {name: "finished" for name, seen in self.states.items() if self._done(seen)}
        if skip_failed:
            self.outcome |= {name: "failed" for name, seen in self.states.items() if seen.status == "failed"}
        self.running: list[Job] = []
        self._locks: dict[str, Any] = {}
        self._look_again = 0.0
        self._durations: dict[str, list[float]] = {}
        for run in self.runs:
            if self._done(self.states[run.name]) and self.states[run.name].seconds:
                self._durations.setdefault(_arm(run), []).append(self.states[run.name].seconds or 0.0)

    def run(self) -> dict[str, str]:
        """Do the runs.

        Returns:
            By name "finished", "failed", or "elsewhere" for one that another bench is at or a process without one.

        Raises:
            KeyboardInterrupt: After the processes were stopped; what they left can be taken up again.
            UsageError: A folder that cannot be written.
        """
        idle_since: float | None = None
        with _terminable():
            try:
                while len(self.outcome) < len(self.runs):
                    self._collect()
                    self._start_what_is_open()
                    if self.running:
                        idle_since = None
                    elif idle_since is None:
                        idle_since = time.monotonic()
                    elif time.monotonic() - idle_since > 1.5 * self.lease:
                        break  # what is left is locked by a bench that lives: a dead one's lease would have run out
                    self.watch(self)
                    time.sleep(POLL)
            finally:
                self._stop()
        return {run.name: self.outcome.get(run.name, "elsewhere") for run in self.runs}

    def remaining(self) -> float | None:
        """Seconds that what is left will take, by what the arm's other runs took, or else all runs; None while unknown."""
        known = [seconds for values in self._durations.values() for seconds in values]
        if not known:
            return None
        elapsed = {job.run.name: time.monotonic() - job.began for job in self.running}
        total = 0.0
        for run in self.runs:
            if run.name not in self.outcome:
                values = self._durations.get(_arm(run), known)
                total += max(0.0, sum(values) / len(values) - elapsed.get(run.name, 0.0))
        return total / self.jobs

    def _state(self, run: Run) -> State:
        return state(self.root / run.name, run, self.grid)

    def _done(self, seen: State) -> bool:
        return seen.status == "finished" or (seen.status == "changed" and self.changed == "keep")

    def _environment(self, threads: int | None) -> dict[str, str]:
        environment = {**os.environ, "PATH": search_path(), "PYTHONUNBUFFERED": "1"}
        if threads is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = max(1, cores // self.jobs)
            return {**dict.fromkeys(THREADS, str(threads)), **environment, **self.grid.env}
        return {**environment, **dict.fromkeys(THREADS, str(threads)), **self.grid.env}

    def _start_what_is_open(self) -> None:
        if len(self.running) >= self.jobs or time.monotonic() < self._look_again:
            return
        for run in self.runs:
            if run.name not in self.outcome and all(job.run is not run for job in self.running):
                self._start(run)
                if len(self.running) >= self.jobs:
                    return
        # What is left is locked, and a look at it costs a few calls to the file system.
        self._look_again = time.monotonic() + self.lease / 20

    def _start(self, run: Run) -> None:
        """Start a run, unless somebody else is at it or it turns out to be done."""
        from filelock import Timeout

        folder = self.root / run.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = self._lock(run)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}") from None
        started = False
        try:
            # Under the lock only: before it, the run's last bench may have been about to finish.
            seen = self._state(run)
            if self._done(seen):
                self.outcome[run.name] = "finished"
            elif seen.status == "failed" and seen.attempts > self.states[run.name].attempts:
                self.outcome[run.name] = "failed"  # by another bench, since this one began
            elif (other := outlives(folder, seen.record, os.path.getmtime(folder / LOCK), self.lease)) is not None:
                self.outcome[run.name] = "elsewhere"
                self.say(f"{run.name}: {other} is still at it, though its bft-bench is gone; left alone")
            else:
                self._launch(run, folder, lock, seen)
                started = True
        finally:
            if not started:
                lock.release()

    def _lock(self, run: Run) -> Any:
        from filelock import SoftFileLease

        # Kept from try to try: how long a lock has not been touched is seen by looking twice.
        if run.name not in self._locks:
            self._locks[run.name] = SoftFileLease(self.root / run.name / LOCK, lease_duration=self.lease)
        return self._locks[run.name]

    def _launch(self, run: Run, folder: Path, lock: Any, seen: State) -> None:
        goes_on = resumption(folder, seen)
        words = command(self.grid, run, folder, goes_on)
        slot = min(set(range(self.jobs)) - {job.slot for job in self.running})
        environment = self.environment | ({"CUDA_VISIBLE_DEVICES": self.gpus[slot]} if self.gpus else {})
        with open(folder / LOG, "ab") as log:
            log.write(f"$ {shlex.join(words)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        record = {
            "name": run.name,
            "axes": run.axes,
            "status": "running",
            "attempts": seen.attempts + 1,
            "resumed": bool(goes_on),
            "command": words,
            "host": socket.gethostname(),
            "pid": process.pid,
            "pid_created": _created(process.pid),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self.running.append(Job(run, folder, slot, lock, process, record))
        write_record(folder, record)
        self.say(f"{run.name}: {'goes on' if record['resumed'] else 'begins'}")

    def _collect(self) -> None:
        for job in list(self.running):
            status = job.process.poll()
            if status is None and job.lock.compromise is not None:
                # This machine slept for longer than a lease, and another has taken the run over.
                self._terminate([job])
                self.running.remove(job)
                self.say(f"{job.run.name}: another bft-bench has taken it over")
                job.lock.release()
            elif status is not None:
                self._finish(job, status)

    def _finish(self, job: Job, status: int) -> None:
        seconds = time.monotonic() - job.began
        try:
            seen = self._state(job.run)
            finished, why = seen.status == "finished", f"exit status {status}"
            if status == 0 and not finished:
                why = f"left {'; '.join(seen.changes)}" if seen.changes else "left no results.json"
        except UsageError as error:
            finished, why = False, str(error)
        ended = {**job.record, "seconds": round(seconds, 1), "exit_status": status}
        if finished:
            self.outcome[job.run.name] = "finished"
            self._durations.setdefault(_arm(job.run), []).append(seconds)
            write_record(job.folder, {**ended, "status": "finished"})
            if self.keep == "results":
                drop_big_files(job.folder)
        else:
            self.outcome[job.run.name] = "failed"
            lines = last_lines(job.folder / LOG)
            write_record(job.folder, {**ended, "status": "failed", "why": why, "last_lines": lines})
        self.running.remove(job)
        job.lock.release()
        done = f"finished in {duration(seconds)}" if finished else f"failed ({why}): {' '.join(lines[-1:])}"
        self.say(f"[{len(self.outcome)}/{len(self.runs)}] {job.run.name} {done}{self._outlook()}")

    def _outlook(self) -> str:
        left = len(self.runs) - len(self.outcome)
        if not left:
            return ""
        seconds = self.remaining()
        return f"; {left} to go" + (f", about {duration(seconds)}" if seconds is not None else "")

    def _stop(self) -> None:
        """Stop what still runs, and write down that it was stopped."""
        if not self.running:
            return
        self.say(f"Stopping {len(self.running)} run{'s' if len(self.running) > 1 else ''}")
        self._terminate(self.running)
        for job in self.running:
            with suppress(OSError):
                write_record(job.folder, {**job.record, "status": "interrupted"})
            job.lock.release()
        self.running = []

    def _terminate(self, jobs: Sequence[Job]) -> None:
        """Ask first: a launcher of several processes has to end them itself, they being no children of this one."""
        # SIGTERM and not SIGINT: in a shell's background SIGINT is ignored, and what is ignored is inherited.
        for job in jobs:
            _signal(job.process, signal.SIGTERM)
        end = time.monotonic() + GRACE
        try:
            for job in jobs:
                with suppress(subprocess.TimeoutExpired):
                    job.process.wait(max(0.0, end - time.monotonic()))
        finally:
            for job in jobs:
                _signal(job.process, signal.SIGKILL)
                job.process.wait()


def _created(pid: int) -> float | None:
    """When a process began, by which a later one of the same number is told from it."""
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the run's whole group, which may outlive the process that leads it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextmanager
def _terminable() -> Iterator[None]:
    """Make of SIGTERM and SIGHUP, by which schedulers and terminals end things, what Ctrl-C is."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    # What is ignored stays so: that is how nohup works.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arm(run: Run) -> str:
    return str(run.axes.get(ARM, ""))


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 9 min 12 s, 4 h 45 min, 3 d 4 h."""
    seconds = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{seconds} s"
