"""Patches Horovod's sources before they are built, each for one fault. A missing passage is an error: nothing is written.

python horovod_patches.py FOLDER     the unpacked sources; plain Python, without any package
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

FLATBUFFERS_SPAN = "third_party/flatbuffers/include/flatbuffers/stl_emulation.h"


class Patch(NamedTuple):
    """One edit: a passage that stands exactly once in a file, what replaces it, and the fault that it mends."""

    file: str
    passage: str
    replacement: str
    reason: str


PATCHES = (
    Patch(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch's headers are C++20",
    ),
    Patch(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch's headers are C++20",
    ),
    Patch(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
        "CUDA's own headers are C++17 from CUDA 13 on",
    ),
    Patch(
        "setup.py",
        "make_args.append('VERBOSE=1')",
        "pass",
        "Ninja, which builds here since make may be missing, does not understand VERBOSE=1",
    ),
    Patch(
        "horovod/common/group_table.h",
        "#include <queue>\n",
        "#include <cstdint>\n#include <queue>\n#include <string>\n",
        "std::string and int32_t are used; before GCC 13, other headers happened to declare them",
    ),
    Patch(
        FLATBUFFERS_SPAN,
        "  pointer const data_;\n",
        "  pointer data_;\n",
        "operator= assigns this member, which no compiler takes once it is called",
    ),
    Patch(
        FLATBUFFERS_SPAN,
        "  const size_type count_;\n",
        "  size_type count_;\n",
        "operator= assigns this member, and GCC 14 refuses that of a const one even where nobody calls it",
    ),
    Patch(
        FLATBUFFERS_SPAN,
        "    count_ = other.count_;\n",
        "    count_ = other.count_;\n    return *this;\n",
        "operator= returns nothing, which is undefined once the patch above lets it compile",
    ),
)


class PassageMissing(ValueError):
    """Sources that a patch does not fit."""


def apply(folder: Path) -> None:
    """Patch the sources in this folder, all or nothing."""
    texts: dict[str, str] = {}
    faults = []
    for patch in PATCHES:
        path = folder / patch.file
        if patch.file not in texts:
            texts[patch.file] = path.read_text() if path.is_file() else ""
        found = texts[patch.file].count(patch.passage)
        if found != 1:
            faults.append(f"{patch.file} has {patch.passage.strip()!r} {found} times, not once ({patch.reason})")
        texts[patch.file] = texts[patch.file].replace(patch.passage, patch.replacement)
    if faults:
        raise PassageMissing("; ".join(faults))
    for name, text in texts.items():
        (folder / name).write_text(text)


def main(arguments: list[str]) -> int:
    """Patch the folder named on the command line, and list the reasons."""
    (folder,) = arguments
    try:
        apply(Path(folder))
    except PassageMissing as fault:
        print(
            f"error: the patches do not fit the Horovod sources in {folder}: {fault}."
            " Change scripts/setting_up/horovod_patches.py",
            file=sys.stderr,
        )
        return 1
    for patch in PATCHES:
        print(f"patched {patch.file}: {patch.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
