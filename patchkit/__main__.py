"""The command line: `python -m patchkit branch|patch|wheel|seams|check`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

try:
    from patchkit import branch, check, onto, patch, seams, wheel
    from patchkit.problem import Problem
    from patchkit.project import Project
except ModuleNotFoundError as error:
    sys.exit(
        f"patchkit: {error}: use the Makefile (make branch), which installs what patchkit needs, "
        "or pip install -r requirements/build.txt"
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 if it did what was asked, 1 with a message if not."""
    args = _parser().parse_args(argv)
    try:
        args.run(Project(args.project), args)
    except Problem as problem:
        print(f"patchkit: {problem}", file=sys.stderr)
    except OSError as error:
        print(f"patchkit: {error}: check that the directory is writable", file=sys.stderr)
    except KeyboardInterrupt:
        print("patchkit: interrupted; run it again to take up from here", file=sys.stderr)
    else:
        return 0
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m patchkit", description=__doc__)
    here = Path(__file__).parent.parent
    parser.add_argument("--project", type=Path, default=here, help="checkout of this repository")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("branch", help="build the branch")
    command.add_argument("--onto", type=Path, help="git checkout of a fork that gets the branch")
    command.add_argument("--out", type=Path, help="where it is built (default: build/sglang)")
    command.set_defaults(run=_branch)

    command = commands.add_parser("patch", help="write the branch as patches to dist/")
    command.set_defaults(run=lambda project, args: patch.build(project))

    command = commands.add_parser("wheel", help="write the patched SGLang as a wheel to dist/")
    command.set_defaults(run=lambda project, args: wheel.build(project))

    command = commands.add_parser("seams", help="print the seams table and put it into README.md")
    command.add_argument("--check", action="store_true", help="only say whether README.md is stale")
    command.set_defaults(
        run=lambda project, args: (seams.check if args.check else seams.write)(project)
    )

    command = commands.add_parser("check", help="check our files and edits against the base")
    command.set_defaults(run=lambda project, args: check.run(project))
    return parser


def _branch(project: Project, args: argparse.Namespace) -> None:
    if args.onto is not None:
        onto.build(project, args.onto.expanduser())
    else:
        branch.build(project, args.out)


if __name__ == "__main__":
    sys.exit(main())
