"""Files of this user alone, also on disks that know neither links nor permissions."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plain_disk import ARCHITECTURES

LIVED = """
import platform, sys
from pathlib import Path
from mesh.errors import BadValue
from mesh.events.repair import finish_interrupted
from mesh.identity.keys import load_or_create
from mesh.paths import StatePaths
from mesh.private_files import write_once
from tests.plain_disk import live_on_one

root = Path(sys.argv[1])
(root / "open").mkdir(mode=0o755)
live_on_one(platform.machine())
paths = StatePaths(root / "own").create()
key = load_or_create(paths.identity_key)
assert load_or_create(paths.identity_key).node_id == key.node_id
assert not write_once(paths.identity_key, b"another")
log, mended = root / "own/log.db", root / "own/log.db.repaired"
log.write_text("damaged")
mended.write_text("mended")
finish_interrupted(log)
print(sorted((file.name, file.read_text()) for file in log.parent.glob("log.db*")))
try:
    StatePaths(root / "open").create()
except BadValue as error:
    print(error)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ARCHITECTURES,
    reason="the calls of other systems are not known here",
)
def test_a_disk_without_links_will_do_and_one_without_permissions_is_refused_by_that(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LIVED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not ended.stderr
    log, refused = ended.stdout.splitlines()[:2]
    assert log == "[('log.db', 'mended'), ('log.db.damaged-1', 'damaged')]"
    assert "open stays open to others: its file system keeps no permissions" in refused
