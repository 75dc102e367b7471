"""Functions that list the unlinked files of a process: their mappings, descriptors and bytes."""

import os
from pathlib import Path

import pytest
import torch

MAPS = Path("/proc/self/maps")
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists the mappings of a process")


def mapped(folder):
    """Return the mappings of unlinked files in `folder`: the addresses and the file of each; empty where unknown."""
    found = []
    for line in MAPS.read_text().splitlines() if MAPS.exists() else ():
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(f"{folder}/") and path[0].endswith(" (deleted)"):
            begin, end = (int(each, 16) for each in addresses.split("-"))
            found.append(((begin, end), inode))
    return found


def open_files(folder):
    """Return the open files in `folder`, by descriptor; empty where unknown."""
    found = []
    for number in os.listdir("/proc/self/fd") if MAPS.exists() else ():
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if path.startswith(f"{folder}/"):
            found.append((number, path))
    return found


def alter(server, *keys, byte=-1, value=None):
    """Alter a byte of the files of a server, of all or those of some keys; return their number.

    A bit of the byte is flipped, unless it gets a value.
    """
    entries = server._state.value.store.entries
    trees = [tree for key, (tree, _) in entries.items() if hasattr(tree, "_storage") and key in (keys or entries)]
    for tree in trees:
        data = torch.empty(0, dtype=torch.uint8).set_(tree._storage)
        data[byte] = data[byte] ^ 1 if value is None else value
    return len(trees)
