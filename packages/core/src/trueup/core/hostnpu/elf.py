"""Reads what a shared library needs, lacks and defines; so no binutils have to be installed."""
import mmap
import struct
from pathlib import Path

SHT_DYNAMIC, SHT_DYNSYM = 6, 11
DT_NEEDED = 1
STB_GLOBAL = 1


class Elf:
    """The dynamic part of a 64-bit little-endian shared object.

    ``needed`` lists the names of the libraries it links to; ``undefined`` and ``defined`` are symbol names.
    Weak undefined symbols are left out: the loader does without them.

    Raises:
        ValueError: ``path`` is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.needed: list[str] = []
        self.undefined: set[str] = set()
        self.defined: set[str] = set()
        # Mapped, not read: torch's largest library has hundreds of megabytes.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:6] != b"\x7fELF\x02\x01":
                raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
            self._read(data)

    def _read(self, data: mmap.mmap) -> None:
        (table,) = struct.unpack_from("<Q", data, 0x28)
        entry, count = struct.unpack_from("<HH", data, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]

        def text(strings: int, at: int) -> str:
            start = sections[strings][4] + at
            return data[start:data.find(b"\0", start)].decode()

        for _, kind, _, _, offset, size, link, *_ in sections:
            if kind == SHT_DYNAMIC:
                for at in range(offset, offset + size, 16):
                    tag, value = struct.unpack_from("<qQ", data, at)
                    if tag == DT_NEEDED:
                        self.needed.append(text(link, value))
            elif kind == SHT_DYNSYM:
                for at in range(offset + 24, offset + size, 24):  # entry 0 is empty by definition
                    name, info, _, section = struct.unpack_from("<IBBH", data, at)
                    if section:
                        self.defined.add(text(link, name))
                    elif info >> 4 == STB_GLOBAL:
                        self.undefined.add(text(link, name))
