"""What is finished is on disk, whole, and can be read back."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path

import pytest
import torch
from cases import build

import flatgauge as fg
from flatgauge.analysis.files import atomic_write, check_writable
from flatgauge.analysis.measurement import Report
from flatgauge.estimators.estimate import Estimate
from flatgauge.surface.examples import bowl

NAMES = ["expected_sharpness", "hessian_max_eigenvalue", "hessian_trace"]


def test_the_report_is_rewritten_after_every_measure(tmp_path):
    path, seen = tmp_path / "r.json", []

    def look(name, done, total):
        if path.exists():
            report = Report.from_json(path)
            seen.append((done, len(report), report.complete))

    report = fg.measure(bowl([1.0, 2.0]), measures=NAMES, progress=look, save=path)
    assert seen == [(1, 1, False), (2, 2, False)]
    assert Report.from_json(path).to_dict() == report.to_dict()
    assert os.listdir(tmp_path) == ["r.json"]


def test_saving_changes_no_value(tmp_path):
    saved = fg.measure(bowl([1.0, 2.0]), measures=NAMES, save=tmp_path / "r.json")
    plain = fg.measure(bowl([1.0, 2.0]), measures=NAMES)
    assert [e.value for e in saved.values()] == [e.value for e in plain.values()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_finished_outlives_an_interruption(tmp_path, error):
    def stop(name, done, total):
        if done == 2:
            raise error("stopped")

    with pytest.raises(error, match="stopped"):
        fg.measure(bowl([1.0]), measures=NAMES, progress=stop, save=tmp_path / "r.json")
    report = Report.from_json(tmp_path / "r.json")
    assert list(report) == NAMES[:2]
    assert not report.complete
    assert "interrupted: not everything" in repr(report)


def test_a_function_may_be_given_instead_of_a_file():
    kept = []
    fg.measure(bowl([1.0]), measures=NAMES, save=kept.append)
    assert [(len(report), report.complete) for report in kept] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    with pytest.raises(TypeError, match="`save=3` must be the path of a file, or a function"):
        fg.measure(bowl([1.0]), measures=NAMES, save=3)


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    surface = bowl([1.0])
    with pytest.raises(FileNotFoundError, match=r"there is no folder `.*gone`; make it first"):
        fg.measure(surface, save=tmp_path / "gone" / "r.json")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        fg.measure(surface, save=tmp_path)
    assert surface.matvecs == 0


def test_a_report_with_layers_and_units_is_read_back_as_it_was(tmp_path):
    names = ["rho_max", "kappa_sum", "normalized_sharpness", "path_norm"]
    report = fg.measure(build("mlp").surface(), measures=names)
    report.to_json(tmp_path / "r.json")
    again = Report.from_json(tmp_path / "r.json")
    assert again.to_dict() == report.to_dict()
    assert again.facts == report.facts
    units = again["rho_max"].units
    assert all(torch.equal(units[k], v.double()) for k, v in report["rho_max"].units.items())
    assert isinstance(again["rho_max"].notes, tuple)


def test_numbers_that_json_has_not_are_read_back(tmp_path):
    facts = fg.measure(bowl([1.0]), measures=["hessian_trace"]).facts
    odd = Estimate(
        math.inf,
        stderr=math.nan,
        layers={"w": -math.inf},
        units={"w": torch.tensor([1.0, math.inf]), "n": torch.tensor([1, 2])},
        notes=("nan",),
    )
    report = Report({"odd": odd}, facts)
    report.to_json(tmp_path / "r.json")
    again = Report.from_json(tmp_path / "r.json")
    assert again.to_json() == report.to_json()
    assert math.isnan(again["odd"].stderr)
    assert again["odd"].layers == {"w": -math.inf}
    assert again["odd"].notes == ("nan",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no JSON"),
        ("[]", "holds no report"),
        ("[" * 100_000, "holds no JSON"),
        ("\x00", "holds no JSON"),
        ('{"rows": []}', "needs `facts` and `measures`, and holds `rows`"),
        ('{"measures": {"a": {}}, "facts": {}}', "`a` of this report lacks `value`"),
        ('{"measures": {"a": 1}, "facts": {}}', "`a` of this report is 1; it must hold"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Report.from_json(tmp_path / "r.json")


def test_a_report_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone.json` is not a file, seen from .*to_json"):
        Report.from_json(tmp_path / "gone.json")


def test_what_a_newer_version_writes_beside_is_left_out():
    contents = fg.measure(bowl([1.0]), measures=["hessian_trace"]).to_dict()
    contents["facts"]["weather"] = "fine"
    contents["command"] = ["measure"]
    assert "weather" not in Report.from_dict(contents).to_dict()["facts"]


# -- files ------------------------------------------------------------------------------------


def test_half_characters_of_file_names_are_written_as_escapes(tmp_path):
    path = atomic_write(tmp_path / "r.json", json.dumps("a\udcff", ensure_ascii=False))
    assert json.loads(path.read_text()) == "a\udcff"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    atomic_write(path, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


def test_permissions_links_and_pipes(tmp_path):
    path, link = tmp_path / "r.json", tmp_path / "link.json"
    atomic_write(path, "old")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    path.chmod(0o640)
    link.symlink_to(path)
    assert atomic_write(link, "new") == link
    assert (link.is_symlink(), path.read_text()) == (True, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert atomic_write("/dev/null", "gone").exists()
    assert check_writable("/dev/null").exists()


def test_the_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    assert check_writable(path) == path
    assert atomic_write(path, "text").read_text() == "text"


REFUSALS = {
    errno.ENOSPC: "the disk is full; free space on it, or name a file on another disk",
    errno.EDQUOT: "your quota is used up; delete files of yours",
    errno.EROFS: "the disk is read-only; name a file on a disk that can be written to",
    errno.EACCES: "you may not write there; name a file in a folder that you may write to",
    errno.EBUSY: f"{os.strerror(errno.EBUSY)}; name another file",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_errors_of_the_file_system_say_what_to_do(tmp_path, monkeypatch, code):
    def refuse(*args, **words):
        raise OSError(code, os.strerror(code))

    path = tmp_path / "r.json"
    atomic_write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(Path, "touch", refuse)
        for write in (lambda: atomic_write(path, "new"), lambda: check_writable(path)):
            with pytest.raises(OSError, match="cannot be written") as caught:
                write()
            assert str(caught.value).startswith(f"`{path}` cannot be written: {REFUSALS[code]}")
            assert (type(caught.value), caught.value.errno) == (type(OSError(code, "")), code)
    assert path.read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_full_disk():
    with pytest.raises(OSError, match=r"`/dev/full` cannot be written: the disk is full; free"):
        atomic_write("/dev/full", "text")


def test_a_file_larger_than_the_limit_is_refused_and_the_old_one_stays(tmp_path):
    resource = pytest.importorskip("resource")
    path, limits = tmp_path / "r.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    atomic_write(path, "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(OSError, match=r"larger than files may be here; raise .*ulimit -f"):
            atomic_write(path, "new" * 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize("write", [check_writable, lambda path: atomic_write(path, "text")])
def test_a_name_that_is_too_long_is_refused(tmp_path, write):
    with pytest.raises(OSError, match="its name is too long; give it a shorter one"):
        write(tmp_path / ("n" * 256))
    assert os.listdir(tmp_path) == []


def test_json_of_results_is_written_whole(tmp_path):
    report = fg.measure(bowl([1.0]), measures=["hessian_trace"])
    report.to_json(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["complete"] is True
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        report.to_json(tmp_path / "gone" / "r.json")
