"""Untrusted code in the sandbox: what it is prevented from doing, and that it cannot forge a passing result.

The attacks run as root if these tests do. Their effects on this machine are checked from outside the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reasoner.sandbox import restrict as lock_module
from reasoner.sandbox.runner import Limits, SandboxRefused, Verdict, run_tests
from tests.long import mostly_long

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the lock is Linux's")

QUICK = Limits(seconds=3.0)
FAKES = "assert f(2) == 4"


def children(parent: int) -> list[int]:
    """Return the ids of the running sandbox processes that this process started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            of = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if of == parent and b"main.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def alive() -> set[int]:
    return {int(folder.name) for folder in Path("/proc").glob("[0-9]*")}


async def until_started(parent: int) -> list[int]:
    """Wait until both processes of a check have started."""
    async with asyncio.timeout(30):
        while len(started := children(parent)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return started


async def passed(code: str, *tests: str, limits: Limits = Limits()) -> list[bool]:
    return [reason is None for reason in (await run_tests(code, tests, limits)).reasons]


@pytest.fixture(autouse=True)
def nothing_survives() -> Iterator[None]:
    """Check that no process of a sandbox outlives its check."""
    yield
    assert not children(os.getpid())


async def test_each_test_of_right_and_wrong_code_is_reported() -> None:
    code = "def f(x):\n    return x + x\n"
    tests = ["assert f(2) == 4", "assert f(2) == 5", "def test_text():\n    assert f('a') == 'aa'", "assert g(1) == 2"]
    result = await run_tests(code, tests, Limits())
    assert [reason is None for reason in result.reasons] == [True, False, True, False]
    assert result.share == 0.5
    assert "NameError" in str(result.reasons[3])


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 10**400, 0.1, float("inf"), 2 + 3j, "é\n\ud800", b"\x00\xff", [], [[1], (2, "x")], {1, 2},
        frozenset({(1, 2)}), {"a": [1], (1, 2): {3}}, range(3).__class__.__name__,
    ],
)  # fmt: skip
async def test_plain_data_is_passed_in_and_out_unchanged(value: object) -> None:
    inf = "from math import inf\n"
    assert await passed(
        "def f(x):\n    return x\n",
        f"{inf}assert f({value!r}) == {value!r}",
        f"{inf}assert type(f({value!r})) is {type(value).__name__}" if value is not None else "assert f(None) is None",
    ) == [True, True]


async def test_objects_keep_their_methods_and_errors_their_types() -> None:
    code = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
class Odd(ValueError): pass
def f(x):
    if x % 2: raise Odd("odd")
    return (i for i in range(x))
def count(stack): return len(stack.items)
LIMIT = 7
"""
    tests = [
        "s = Stack()\ns.push(3)\ns.push(4)\nassert len(s) == 2 and s.pop() == 4 and s.items == [3] and count(s) == 1",
        "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'odd'\nelse:\n    raise AssertionError",
        "assert list(f(4)) == [0, 1, 2, 3] and sum(f(4)) == 6",
        "import unittest\nassert LIMIT == 7",
        "s = Stack()\ntry:\n    s.pop()\nexcept IndexError:\n    pass\nelse:\n    raise AssertionError",
    ]
    assert await passed(code, *tests) == [True] * 5


async def test_only_the_standard_library_can_be_imported() -> None:
    code = "import math, re, collections.abc\nfrom datetime import datetime\nimport heapq as h\n" + (
        "def f():\n    return math.gcd(4, 6), datetime.strptime('2020-01-02', '%Y-%m-%d').day, h.nsmallest(1, [3, 1])\n"
    )
    assert await passed(code, "assert f() == (2, 2, [1])") == [True]
    assert await passed("import pydantic\n", "assert True") == [False]
    assert await passed("import nothing_of_this_name\n", "assert True") == [False]


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x):\n    raise SystemExit(0)",
        "def f(x):\n    raise KeyboardInterrupt",
        "print('{\"begun\": true}\\n{\"passed\": true, \"reason\": null}', flush=True)\nimport os\nos._exit(0)",
        "import os\nfor fd in range(64):\n    try:\n"
        "        os.write(fd, b'{\"passed\": true, \"reason\": null}\\n' * 9)\n"
        "    except OSError:\n        pass",
        "class Equal:\n    def __eq__(self, other): return True\n    __bool__ = lambda self: True\n"
        "def f(x):\n    return Equal()",
        "class Four(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x):\n    return Four(5)",
        "import builtins\nbuiltins.AssertionError = SystemExit\nassert_ = lambda *a: True\n",
        "def AssertionError(*a): pass\ndef exec(*a): pass\ndef f(x):\n    return 5",
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x):\n    return 5",
        "import sys, json\nfor module in list(sys.modules.values()):\n    if hasattr(module, 'test'):\n"
        "        module.test = lambda *a: None\njson.dumps = lambda *a: '{\"passed\": true}'\ndef f(x):\n    return 5",
        "import gc\nfor thing in gc.get_objects():\n    if type(thing).__name__ == 'Pipe':\n"
        "        thing.send({'ready': True})\n        thing.send({'passed': True, 'reason': None})\n"
        "        thing.send({'value': {'o': 0}})\ndef f(x):\n    return 5",
        "import sys\nframe = sys._getframe()\nwhile frame.f_back:\n    frame = frame.f_back\n"
        "    frame.f_locals.get('task', {})['tests'] = []\ndef f(x):\n    return 5",
        "import signal, os\nos.kill(os.getppid(), signal.SIGKILL)\n",
        "__builtins__ = None\n",
        "(" * 5000,
        "def f(x):\n    return f(x)",
        "\x00",
        "",
    ],
)  # fmt: skip
async def test_no_code_can_forge_a_passing_result(code: str) -> None:
    assert await passed(code, FAKES, f"def test():\n    {FAKES}", limits=QUICK) == [False, False]


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(1000)",
        "def f(x):\n    while True:\n        pass",
        "def f(x):\n    return 9**9**9**9",
        "import re\ndef f(x):\n    return re.match('(a+)+$', 'a' * 64 + 'b')",
        "def f(x):\n    def forever():\n        while True:\n            yield 1\n    return list(forever())",
        "x = bytearray(1 << 40)",
        "x = [0]\nwhile True:\n    x += x",
        "def f(x):\n    print('x' * (1 << 20))\n    return f(x)",
        "def f(x):\n    while True:\n        print('x' * (1 << 20))",
        "def f(x):\n    return 'x' * (1 << 28)",
        "def f(x):\n    y = []\n    for _ in range(100000):\n        y = [y]\n    return y",
        "import os\nwhile True:\n    os.fork()",
        "import threading\nwhile True:\n    threading.Thread(target=lambda: None).start()",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 60))\nwhile True:\n    pass",
        "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n    pass",
    ],
)
async def test_no_code_exceeds_its_time_and_memory_limits(code: str) -> None:
    began = time.monotonic()
    assert await passed(code, FAKES, limits=Limits(1.0, 256 << 20)) == [False]
    assert time.monotonic() - began < 60  # against a hang; the limit is a second


TRIES = """
import {module}
def tried():
    try:
        {attempt}
    except PermissionError:
        return "refused"
    except BaseException as error:
        return type(error).__name__
    return "done"
"""


SYSTEM_CALLS = [
    ("os", "os.open({marker!r}, os.O_CREAT | os.O_WRONLY)"),
    ("io", "open({marker!r}, 'w').write('x')"),
    ("tempfile", "tempfile.mkdtemp(dir='/tmp')"),
    ("os", "os.mkdir({marker!r})"),
    ("os", "os.symlink('/etc/passwd', {marker!r})"),
    ("os", "os.link('/etc/passwd', {marker!r})"),
    ("os", "os.rename({victim!r}, {marker!r})"),
    ("os", "os.unlink({victim!r})"),
    ("os", "os.truncate({victim!r}, 0)"),
    ("os", "os.chmod({victim!r}, 0o777)"),
    ("os", "os.mkfifo({marker!r})"),
    ("os", "os.chdir('/')"),
    ("os", "os.chroot('/')"),
    ("os", "os.listdir('/')"),
    ("io", "open({victim!r}).read()"),
    ("io", "open('/proc/{parent}/environ', 'rb').read()"),
    ("io", "open('/proc/self/mem', 'r+b')"),
    ("socket", "socket.socket().connect(('127.0.0.1', {port}))"),
    ("socket", "socket.socket(socket.AF_UNIX)"),
    ("socket", "socket.socketpair()"),
    ("socket", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    ("os", "os.kill({parent}, 0)"),
    ("os", "os.kill({parent}, 9)"),
    ("os", "os.killpg(os.getpgid(0), 9)"),
    ("os", "os.fork()"),
    ("os", "os.execv('/bin/true', ['true'])"),
    ("subprocess", "subprocess.run(['true'])"),
    ("os", "os.posix_spawn('/bin/true', ['true'], {{}})"),
    ("os", "os.setsid()"),
    ("os", "os.setuid(0)"),
    ("os", "os.nice(-5)"),
    ("os", "os.sched_setaffinity(0, [0])"),
    ("os", "os.pidfd_open({parent})"),
    ("os", "os.memfd_create('x')"),
    ("os", "os.pipe()"),
    ("os", "os.eventfd(0)"),
    ("resource", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    ("resource", "resource.prlimit({parent}, resource.RLIMIT_CPU, (1, 1))"),
    ("signal", "signal.signal(signal.SIGALRM, signal.SIG_IGN)"),
    ("select", "select.epoll()"),
]


@pytest.mark.parametrize(("module", "attempt"), mostly_long(SYSTEM_CALLS, every=2))
async def test_system_calls_beyond_computing_are_refused(module: str, attempt: str, tmp_path: Path) -> None:
    marker, victim = tmp_path / "marker", tmp_path / "victim"
    victim.write_text("secret")
    victim.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"marker": str(marker), "victim": str(victim), "parent": os.getpid(), "port": server.getsockname()[1]}
        code = TRIES.format(module=module, attempt=attempt.format(**names))
        result = await run_tests(code, ["assert tried() in ('refused', 'OSError', 'ValueError'), tried()"], QUICK)
    assert result.reasons == (None,)
    assert os.listdir(tmp_path) == [victim.name]
    assert victim.read_text() == "secret"
    assert victim.stat().st_mode & 0o777 == 0o644


RAW = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def raw(number, *args):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(arg) for arg in args])
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""


async def test_system_calls_from_machine_code_are_filtered_too() -> None:
    """Calls that no Python library makes are refused by number, on x86-64 and in its x32 table."""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    names = {"ptrace": 101, "mount": 165, "bpf": 321, "io_uring_setup": 425, "clone3": 435, "userfaultfd": 323}
    names |= {"process_vm_readv": 310, "process_vm_writev": 311, "unshare": 272, "setns": 308, "openat2": 437}
    names |= {
        "seccomp": 317,
        "prctl": 157,
        "keyctl": 250,
        "perf_event_open": 298,
        "pidfd_getfd": 438,
        "alarm": 37,
        "setitimer": 38,
        "socket": 41,
    }
    names |= {"tgkill": 234, "vfork": 58, "clone": 56, "x32 open": 0x40000000 + 2, "x32 socket": 0x40000000 + 41}
    tests = [f"assert raw({number}, 0, 0, 0, 0, 0) == 'EPERM', raw({number})" for number in names.values()]
    result = await run_tests(RAW, tests, QUICK)
    assert dict(zip(names, result.reasons, strict=True)) == dict.fromkeys(names)


async def test_the_environment_and_the_arguments_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONER_API_KEYS", "a-secret-of-the-worker")
    code = "import os, sys\ndef f():\n    return repr((dict(os.environ), sys.argv, sys.path))\n"
    assert await passed(code, "assert 'secret' not in f() and 'REASONER' not in f() and 'PATH' not in f()") == [True]


async def test_test_code_is_sandboxed_too() -> None:
    reads = "open('/etc/passwd').read()"
    spawns = "import os\nos.fork()"
    exits = "import os\nos._exit(0)"
    assert await passed("", reads, spawns, exits, "assert True") == [False, False, False, False]


async def test_call_arguments_are_copies_so_code_cannot_change_expected_values() -> None:
    code = "def f(items):\n    items.clear()\n    return 0\n"
    assert await passed(code, "items = [1, 2]\nassert f(items) == sum(items)") == [False]


async def test_a_test_that_hangs_fails_and_earlier_ones_still_count() -> None:
    code = "def f(x):\n    while x:\n        pass\n    return x\n"
    assert await passed(code, "assert f(0) == 0", "assert f(1) == 1", "assert f(0) == 0", limits=Limits(1.0)) == [
        True,
        False,
        False,
    ]


async def test_a_cancelled_check_leaves_no_process(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    check = asyncio.create_task(run_tests("while True:\n    pass", [FAKES], Limits(60.0)))
    await until_started(os.getpid())
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_checks_leave_no_files_and_no_file_descriptors() -> None:
    await passed("def f(x):\n    return 4", FAKES)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert await passed("def f(x):\n    return 4", FAKES) == [True]
    assert len(os.listdir("/proc/self/fd")) == before


async def test_concurrent_checks_do_not_mix_their_results() -> None:
    async def one(index: int) -> Verdict:
        return await run_tests(f"def f():\n    return {index}", [f"assert f() == {index}", "assert f() == 3"], Limits())

    results = await asyncio.gather(*(one(index) for index in range(6)))
    assert [result.reasons[0] for result in results] == [None] * 6
    assert [result.reasons[1] is None for result in results] == [index == 3 for index in range(6)]


async def test_without_a_working_filter_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Removes the filter's table in the child, as on a machine without support."""
    script = tmp_path / "main.py"
    source = Path(lock_module.__file__).with_name("main.py")
    text = source.read_text().replace("Path(__file__).parents[2]", f"{str(source.parents[2])!r}")
    script.write_text(
        text.replace("_NEEDED_LATER = ", "import reasoner.sandbox.restrict as l\nl._MACHINES = ()\n_NEEDED_LATER = ")
    )
    monkeypatch.setattr("reasoner.sandbox.runner._MAIN", script)
    marker = tmp_path / "ran"
    with pytest.raises(SandboxRefused, match="no system call filter"):
        await run_tests(f"open({str(marker)!r}, 'w')", ["assert True"], QUICK)
    assert not marker.exists()
    unlocked = await run_tests("def f(x):\n    return 4", [FAKES], QUICK, locked=False)
    assert unlocked.reasons == (None,)


async def test_a_filter_that_fails_its_self_check_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    source = Path(lock_module.__file__).with_name("main.py")
    text = source.read_text().replace("Path(__file__).parents[2]", f"{str(source.parents[2])!r}")
    permissive = "import reasoner.sandbox.restrict as l\nl._FAIL_WITH_EPERM = l._ALLOW\n_NEEDED_LATER = "
    script.write_text(text.replace("_NEEDED_LATER = ", permissive))
    monkeypatch.setattr("reasoner.sandbox.runner._MAIN", script)
    with pytest.raises(SandboxRefused, match="can still be opened"):
        await run_tests("", ["assert True"], QUICK)


async def test_an_orphaned_sandbox_ends_by_itself() -> None:
    """Kills the parent while the sandboxed code sleeps, so that nothing wakes it."""
    code = "import time\\nwhile True:\\n    time.sleep(1000)"
    script = (
        "import asyncio\nfrom reasoner.sandbox.runner import Limits, run_tests\n"
        f"asyncio.run(run_tests('{code}', ['f()'], Limits(1.0)))"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    started = await until_started(parent.pid)
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(60):
        while set(started) & alive():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
