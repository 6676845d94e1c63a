"""What the extension needs from a machine: nothing that a plain Linux does not have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pagedlora import _core

ALLOWED = {
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libstdc++.so.6",
}


def needed_libraries(library: str) -> set[str]:
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))


def test_the_extension_needs_no_library_of_cuda_or_torch() -> None:
    needed = needed_libraries(_core.__file__)
    assert "libstdc++.so.6" in needed  # the listing was understood
    loaders = {name for name in needed if name.startswith("ld-linux")}
    assert needed - loaders <= ALLOWED


def test_the_extension_is_imported_where_no_library_of_a_driver_can_be_found() -> None:
    # The static runtime asks the dynamic loader for the driver; an empty answer must not matter.
    code = "from pagedlora import _core; print(_core.gpu_support()['state'])"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in {
        "built without CUDA",
        "no driver",
        "driver too old",
        "no device",
    }
    assert Path(_core.__file__).suffix == ".so"
