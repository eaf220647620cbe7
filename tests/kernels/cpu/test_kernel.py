"""The library of torch's thread pool is found among the mapped files of the process."""

from __future__ import annotations

from pathlib import Path

import pytest

kernel = pytest.importorskip("kernels.cpu.runtime.kernel")

MAPS = """\
55d0a0a00000-55d0a0a01000 r--p 00000000 fe:00 131077                     /usr/bin/python3.11
7f10c4000000-7f10c4021000 rw-p 00000000 00:00 0
7f10d0a00000-7f10d0a10000 r--p 00000000 fe:00 917512                     /home/me/my programs/lib/libgomp-a34b3233.so.1
7f10d0a10000-7f10d0a30000 r-xp 00010000 fe:00 917512                     /home/me/my programs/lib/libgomp-a34b3233.so.1
7ffd1f3f9000-7ffd1f41b000 rw-p 00000000 00:00 0                          [stack]
"""


def test_a_library_is_found_in_a_folder_whose_name_has_a_space() -> None:
    assert kernel.mapped_files(MAPS) == ["/usr/bin/python3.11", "/home/me/my programs/lib/libgomp-a34b3233.so.1"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc, which Linux alone has")
def test_every_mapped_file_of_this_process_has_its_whole_path() -> None:
    found = kernel.mapped_files(Path("/proc/self/maps").read_text())
    assert found
    assert all(Path(path).exists() or path.endswith(" (deleted)") for path in found)
