"""What an installed hearthnet consists of: hatch is asked which files it would put into a wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MANIFESTS = "mesh/coordination/manifests"


def test_a_wheel_has_whatever_the_packages_need_beside_their_code() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    files = wheel.WheelBuilder(str(ROOT)).recurse_included_files()
    shipped = {file.distribution_path for file in files}
    assert {f"{MANIFESTS}/modelmetadata-crd.yaml", f"{MANIFESTS}/rbac.yaml"} <= shipped
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("mesh", "tui")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here - shipped == set()
    assert not [path for path in shipped if not path.startswith(("mesh/", "tui/"))]
