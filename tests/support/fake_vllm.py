"""A package `vllm` on disk in which every name stands that this project uses, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from serving.vllm.names import BENCH_NAMES, NAMES, Name


def merged(names: Iterable[Name]) -> list[Name]:
    """One entry for each path, with all that any entry of it relies on."""
    found: dict[str, Name] = {}
    for name in names:
        old = found.get(name.path, Name(name.path))
        takes, has, says = (
            tuple(dict.fromkeys((*getattr(old, field), *getattr(name, field))))
            for field in ("takes", "has", "says")
        )
        found[name.path] = Name(name.path, takes, has, says)
    return list(found.values())


ALL = merged([*(name for group in NAMES.values() for name in group), *BENCH_NAMES])


def write_vllm(folder: Path, *, without: str = "") -> Path:
    """The package in a folder, but for one name. Returns its directory."""
    modules: dict[str, dict[str, list[str]]] = {}
    for name in ALL:
        module, _, path = name.path.partition(":")
        owner, dot, last = path.partition(".")
        if name.path == without or owner == without.rpartition(":")[2] and module in without:
            continue
        body = modules.setdefault(module, {}).setdefault(owner, [])
        body += _lines(name, last if dot else "")
    for module, classes in modules.items():
        file = folder.joinpath(*module.split("."))
        file.mkdir(parents=True, exist_ok=True)
        (file / "__init__.py").write_text("\n".join(_text(*item) for item in classes.items()))
    for directory in {folder / "vllm", *(folder / "vllm").rglob("*")}:
        if directory.is_dir():
            (directory / "__init__.py").touch()
    return folder / "vllm"


def _lines(name: Name, method: str) -> list[str]:
    says = [f"        {text!r}" for text in name.says]
    if method:
        return [f"    def {method}({', '.join(name.takes)}):", *(says or ["        pass"])]
    if name.takes:
        return [f"def {{}}({', '.join(name.takes)}):", *(says or ["        pass"])]
    return [f"    {field}: int" for field in name.has]


def _text(owner: str, body: list[str]) -> str:
    if body and body[0].startswith("def {}"):
        return "\n".join(body).format(owner)
    return "\n".join([f"class {owner}:", *(body or ["    pass"])])
