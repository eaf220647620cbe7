"""A machine that lacks what a GPU needs is told so in one line before any weights are read."""

from __future__ import annotations

import errno
import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.core.model_setup import select_model_device
from engine.device import select_device
from engine.gpu_requirements import (
    check_cache_folder,
    check_compiler,
    check_gpu,
    find_cache_folder,
    has_code_for,
    refuse_old_driver,
)
from engine.protocol.options import EngineOptions
from engine.protocol.types import EngineError
from tests.engine.conftest import Checkpoints
from tests.engine.helpers import SMALL, Harness

H100 = ["sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture
def gpu(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Present a machine with all that the GPU path needs."""
    checkpoints("qwen3")  # made before torch believes in a GPU
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"include": str(tmp_path / "include")})
    monkeypatch.setattr("engine.gpu_requirements.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("engine.gpu_requirements.find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: H100)


@pytest.mark.usefixtures("gpu")
def test_a_complete_machine_passes(tmp_path: Path) -> None:
    check_gpu(torch.device("cuda"))
    assert (tmp_path / "cache").is_dir()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_computes_in_deterministic_mode_too(checkpoints: Checkpoints, *, deterministic: bool) -> None:
    found = select_model_device(checkpoints("qwen3"), EngineOptions(deterministic=deterministic))
    assert (found.device.type, found.is_batch_invariant) == ("cuda", deterministic)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("target", "value", "words"),
    [
        ("engine.gpu_requirements.find_spec", lambda _: None, r"need Triton: pip install 'reasoner\[gpu\]'"),
        ("engine.gpu_requirements.which", lambda _: None, "install gcc or clang"),
        ("sysconfig.get_paths", lambda *_: {"include": "/nowhere"}, "/nowhere/Python.h is missing"),
        ("torch.cuda.get_device_capability", lambda _: (7, 5), "needs compute capability 8.0; .* 7.5"),
        (
            "torch.cuda.get_device_capability",
            lambda _: (12, 0),
            "no code for NVIDIA H100 .*12.0.*only for sm_75, sm_80",
        ),
        ("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC), "mounted noexec"),
    ],
)
def test_what_is_missing_is_named_before_weights_are_read(
    target: str, value: object, words: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, value)
    monkeypatch.setattr("engine.core.model_setup.load_model", None)
    with pytest.raises(EngineError, match=words) as caught:
        Harness(checkpoints("qwen3"), SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("gpu")
def test_a_wrong_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "icc")
    check_compiler()
    monkeypatch.setattr("engine.gpu_requirements.which", lambda name: None if name == "icc" else name)
    with pytest.raises(EngineError, match="CC is 'icc'"):
        check_compiler()


def test_the_cache_folder_is_that_of_triton() -> None:
    knobs = pytest.importorskip("triton.knobs")
    assert find_cache_folder(os.environ) == Path(knobs.cache.dir)
    assert find_cache_folder({"TRITON_CACHE_DIR": "/a", "TRITON_HOME": "/b"}) == Path("/a")
    assert find_cache_folder({"TRITON_HOME": "/b"}) == Path("/b/.triton/cache")


def test_a_read_only_cache_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("engine.gpu_requirements.tempfile.TemporaryFile", refuse)
    with pytest.raises(EngineError, match=r"cache \(Read-only file system\): set TRITON_CACHE_DIR"):
        check_cache_folder(tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="set TRITON_CACHE_DIR"):
        check_cache_folder(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), H100, True),
        ((8, 9), H100, True),
        ((10, 0), H100, False),
        ((10, 0), [*H100, "compute_90"], True),
        ((8, 0), ["sm_86"], False),
        ((10, 3), ["sm_90a", "sm_100"], True),
        ((10, 3), ["sm_100a", "sm_120"], False),
        ((12, 0), ["sm_100", "sm_120a"], True),
        ((9, 0), ["gfx90a"], False),
    ],
)
def test_torch_must_have_code_for_the_gpu(capability: tuple[int, int], architectures: list[str], *, runs: bool) -> None:
    assert has_code_for(capability, architectures) == runs


def test_an_old_driver_is_named_instead_of_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports no device then, and ``auto`` would compute on the CPU without a word."""
    reason = "The NVIDIA driver on your system is too old (found version 11040)."

    def fail() -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for device in ("auto", "cuda"):
        with pytest.raises(EngineError, match=r"driver is too old .*CUDA 13.0: update the driver"):
            select_device(device, "auto")
    assert select_device("cpu", "auto").device.type == "cpu"
    assert select_device("auto", "auto", cpu_only_reason="it is old").device.type == "cpu"
    reason = "Found no NVIDIA driver on your system."
    refuse_old_driver()
    assert select_device("auto", "auto").device.type == "cpu"
