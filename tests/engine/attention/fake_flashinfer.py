"""A stand-in for the package FlashInfer: the documented meaning of its two paged wrappers, in float64.

Signatures are those of flashinfer-python 0.7.2.post1, without what is not used. It refuses arguments that the package
would misread or refuse, and any cache but the one that it is to read in place.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class _PagedWrapper:
    """Plan and run of both wrappers."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        check(workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20, "128 MiB of bytes")
        check(workspace.data_ptr() % 16 == 0, "an aligned workspace")
        check(kv_layout == "HND" and backend == "fa2", "pages of heads, read by FA2's kernels")
        self.device = workspace.device
        self._plan: dict[str, object] | None = None

    def _set(self, query_starts: Tensor, starts: Tensor, pages: Tensor, last_lens: Tensor, **about: object) -> None:
        arrays = query_starts, starts, pages, last_lens
        for array in arrays:
            check(array.dtype == torch.int32 and array.dim() == 1 and array.is_contiguous(), "int32 vectors")
            check(array.device.type == "cpu", "arrays on the host, which are not copied back")
        rows, page_size = len(last_lens), about["page_size"]
        assert isinstance(page_size, int)
        check(rows > 0 and len(query_starts) == len(starts) == rows + 1, "one more start than rows")
        for each, end in ((query_starts, None), (starts, len(pages))):
            check(each[0] == 0 and bool((each.diff() > 0).all()) and end in (None, int(each[-1])), "ascending starts")
        check(bool(((last_lens >= 1) & (last_lens <= page_size)).all()), "last pages with 1 to page_size tokens")
        check(about["head_dim"] in HEAD_DIMS and about["q"] in DTYPES and about["q"] == about["kv"], "types and sizes")
        self._arrays = tuple(array.clone() for array in arrays)
        self._plan = about

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        about = self._plan
        assert about is not None, "plan() comes before run()"
        query_starts, starts, pages, last_lens = (array.tolist() for array in self._arrays)
        heads, kv_heads, dim, page_size = (about[name] for name in ("heads", "kv_heads", "head_dim", "page_size"))
        check(q.shape == (query_starts[-1], heads, dim) and q.dtype == about["q"], "the planned queries")
        check(q.stride(-1) == 1 and q.device == self.device, "queries whose numbers lie together, on the device")
        keys, values = paged_kv_cache
        for each in paged_kv_cache:
            check(each.shape[1:] == (kv_heads, page_size, dim) and each.dtype == about["kv"], "the planned pages")
            check(each.stride() == keys.stride() and each.stride(-1) == 1, "equal strides of keys and values")
            check(max(each.stride()) < 1 << 32 and each.device == self.device, "strides of 32 bits, on the device")
            cache = CACHES[-1] if CACHES else values
            check(each.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr(), "the cache, no copy")
        check(max(pages) < len(keys) and min(pages) >= 0, "pages of the cache")
        check(out is not None and out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous(), "the output")
        assert out is not None
        for row in range(len(last_lens)):
            own = pages[starts[row] : starts[row + 1]]
            length = (len(own) - 1) * page_size + last_lens[row]
            tokens = slice(query_starts[row], query_starts[row + 1])
            k, v = (x[own].transpose(0, 1).flatten(1, 2)[:, :length].double() for x in (keys, values))
            out[tokens] = self._attend(q[tokens].double(), k, v, about).to(out.dtype)
        return out

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, about: dict[str, object]) -> Tensor:
        group = q.shape[1] // len(k)
        scores = torch.einsum("thd,hkd->htk", q, k.repeat_interleave(group, dim=0)) * about["scale"]
        if about["softcap"]:
            scores = torch.tanh(scores / about["softcap"]) * about["softcap"]
        key = torch.arange(k.shape[1])
        query = torch.arange(k.shape[1] - len(q), k.shape[1])[:, None]
        visible = key <= query if about["causal"] else torch.ones(len(q), len(key), dtype=torch.bool)
        window_left = about["window_left"]
        assert isinstance(window_left, int)
        if window_left >= 0:
            visible = visible & (key >= query - window_left)
        scores = scores.masked_fill(~visible, -torch.inf)
        return torch.einsum("htk,hkd->thd", scores.softmax(-1), v.repeat_interleave(group, dim=0))


CACHES: list[Tensor] = []
"""The last one, if there is one, is the only cache that may be read."""


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        limits = {"scale": sm_scale or head_dim_qk**-0.5, "window_left": window_left, "softcap": logits_soft_cap}
        sizes = {"heads": num_qo_heads, "kv_heads": num_kv_heads, "head_dim": head_dim_qk, "page_size": page_size}
        self._set(*arrays, causal=causal, q=q_data_type, kv=kv_data_type or q_data_type, **sizes, **limits)


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **kwargs: object,
    ) -> None:
        known = {"sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type"}
        check(set(kwargs) <= known, f"an unknown argument in {kwargs}")
        check(self._use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8), "the ratio of heads")
        query_starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        names = {"sm_scale": "scale", "window_left": "window_left", "logits_soft_cap": "softcap"}
        limits = {"scale": head_dim**-0.5, "window_left": -1, "softcap": None}
        limits |= {names[name]: value for name, value in kwargs.items() if name in names}
        q = kwargs.get("q_data_type", torch.float16)
        types = {"q": q, "kv": kwargs.get("kv_data_type") or q}
        sizes = {"heads": num_qo_heads, "kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
        self._set(query_starts, indptr, indices, last_page_len, causal=False, **types, **sizes, **limits)


def install(monkeypatch: pytest.MonkeyPatch, **attributes: object) -> ModuleType:
    """Make ``import flashinfer`` find the stand-in, or one with other attributes."""
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    wrappers = (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper)
    vars(module).update({"__version__": "0.7.2", **{each.__name__: each for each in wrappers}, **attributes})
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module
