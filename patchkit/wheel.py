"""The wheel: the base's own, with our files in it and our label on its version.

Dependencies, entry points and everything else stay the base's; RECORD is written anew.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from pathlib import Path

from patchkit import plan
from patchkit.base import Base
from patchkit.problem import Problem
from patchkit.project import Project

_EPOCH = (1980, 1, 1, 0, 0, 0)


def build(project: Project, directory: Path | None = None) -> Path:
    """Write the patched wheel to `directory` (default dist/). Same input, same bytes."""
    base = project.base
    directory = directory or project.dist
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / base.wheel.replace(f"-{base.version}-", f"-{base.patched_version}-")
    ours = project.ours()
    with project.lock():
        tree = project.base_tree
    steps = plan.make(tree, ours, project.series, base.replaces)
    # The last step that changes a file has its final content.
    changed = {p: content for step in steps for p, content in step.files.items()}
    new = target.with_name(f".{target.name}.new")
    with zipfile.ZipFile(tree.wheel) as old, zipfile.ZipFile(new, "w") as wheel:
        _write(base, old, wheel, changed)
    new.replace(target)
    print(target)
    return target


def _write(
    base: Base, old: zipfile.ZipFile, wheel: zipfile.ZipFile, changed: dict[str, bytes]
) -> None:
    theirs, ours = (f"{base.project}-{v}.dist-info/" for v in (base.version, base.patched_version))
    record = [(f"{ours}RECORD", "", "")]

    def add(info: zipfile.ZipInfo, content: bytes) -> None:
        info.compress_type = zipfile.ZIP_DEFLATED
        wheel.writestr(info, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.insert(-1, (info.filename, f"sha256={digest}", str(len(content))))

    package = {p.removeprefix("python/"): c for p, c in changed.items() if p.startswith("python/")}
    for name in sorted(package.keys() - set(old.namelist())):
        info = zipfile.ZipInfo(name, _EPOCH)
        info.external_attr = 0o644 << 16
        add(info, package[name])
    for info in old.infolist():
        name = info.filename
        if name in (f"{theirs}RECORD", f"{theirs}RECORD.jws", f"{theirs}RECORD.p7s"):
            continue
        content = package[name] if name in package else old.read(info)
        if name == f"{theirs}METADATA":
            content = _labelled(content, rb"(?m)^(Version: )()%s()\r?$", base)
        elif name == f"{base.project}/_version.py":
            content = _labelled(content, rb"(version = )(['\"])%s(['\"])", base)
            content = _labelled_tuple(content, base)
        # A copy: writestr changes offsets and sizes of what it is given.
        new = zipfile.ZipInfo(name.replace(theirs, ours, 1), info.date_time)
        new.external_attr = info.external_attr
        add(new, content)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(record)
    info = zipfile.ZipInfo(f"{ours}RECORD", _EPOCH)
    info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
    wheel.writestr(info, table.getvalue())


def _labelled(content: bytes, pattern: bytes, base: Base) -> bytes:
    """Replace the base's version, once, where `pattern` has it between its groups."""
    wanted = pattern.replace(b"%s", re.escape(base.version).encode())
    new = rb"\g<1>\g<2>" + base.patched_version.encode() + rb"\g<3>"
    content, count = re.subn(wanted, new, content, count=1)
    if not count:
        raise Problem(f"{base.wheel}: no version {base.version} where the wheel should state it")
    return content


def _labelled_tuple(content: bytes, base: Base) -> bytes:
    """Put the label behind the parts of `version_tuple`, as setuptools-scm writes local labels."""
    tuple_ = rb"(version_tuple = \([^()]*?),?\)"
    return re.sub(tuple_, rb"\g<1>, '" + base.label.encode() + rb"')", content, count=1)
