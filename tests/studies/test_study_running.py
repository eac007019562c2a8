"""Studies that are run: what is kept, what counts, what continues."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_studies import CHEAP, TINY, tiny_study

import flatgauge as fg
from flatgauge.studies import PoolResult
from flatgauge.studies.data import load_data
from flatgauge.studies.store import PoolStore
from flatgauge.studies.training import train

#: Works on the tiny study in a folder, and says which run it begins.
WORKER = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from small_studies import TINY, tiny_study
recipe = TINY.but(samples=200, epochs=12)
study = tiny_study(recipe=recipe, factors={{"network": ["mlp-6", "lenet5"], "batch": [8, 32]}})
study.run({folder!r}, resume=True, progress=lambda run, done, total: print(run, flush=True))
"""


def worker(folder: Path) -> subprocess.Popen[str]:
    code = WORKER.format(tests=str(Path(__file__).parent), folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def finish(folder: Path) -> None:
    process = worker(folder)
    process.communicate(timeout=300)
    assert process.returncode == 0


def numbers_of(folder: Path) -> dict[str, object]:
    """What was found, without times."""
    found = {}
    for name, row in sorted(PoolStore(folder).rows().items()):
        scores = {key: value for key, value in row["scores"].items() if key != "seconds"}
        values = {key: part["value"] for key, part in row["measured"]["measures"].items()}
        found[name] = row["columns"], row["state"], scores, values
    return found


def finished(folder: Path) -> dict[str, object]:
    """Everything finished: which file every network is and when it was written, and all rows."""
    found: dict[str, object] = {}
    for path in (folder / "models").glob("*.safetensors"):
        found[path.name] = path.stat().st_ino, path.stat().st_mtime_ns
    rows = folder / "rows.jsonl"
    lines = rows.read_bytes().splitlines() if rows.exists() else []
    for line in lines:
        if line.endswith(b"}"):
            name = json.loads(line)["name"]
            assert name not in found, f"{name} was measured twice"
            found[name] = line
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder)
    return folder


@pytest.mark.slow
def test_killed_at_random_points_it_goes_on_with_no_run_lost_or_done_twice(
    undisturbed: Path, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)  # Told by every message below.
    generator = random.Random(seed)
    kept: dict[str, tuple[int, int]] = {}
    for _ in range(4):
        process = worker(tmp_path)
        wanted = len(kept) + generator.randint(0, 2)
        # At least one thing of every process is begun: what is killed is never only the start.
        begun = process.stdout.readline()
        while process.poll() is None and len(finished(tmp_path)) < wanted:
            time.sleep(0.01)
        time.sleep(generator.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert begun or process.returncode == 0
        now = finished(tmp_path)
        assert kept.items() <= now.items(), f"finished files were touched, seed {seed}"
        kept = now
    finish(tmp_path)
    assert kept.items() <= finished(tmp_path).items(), f"finished files were touched, seed {seed}"
    assert numbers_of(tmp_path) == numbers_of(undisturbed), f"seed {seed}"


@pytest.mark.slow
def test_workers_find_what_one_process_finds(tmp_path: Path) -> None:
    study = tiny_study()
    alone = study.run(tmp_path / "alone").to_frame()
    together = study.run(tmp_path / "together", workers=2).to_frame()
    assert alone.drop(columns="seconds").equals(together.drop(columns="seconds"))


def test_a_row_is_reproducible_from_its_recipe(tmp_path: Path) -> None:
    found = tiny_study().run(tmp_path)
    run, row = list(found.rows.items())[5]
    recipe = fg.Recipe.from_dict(row["columns"])
    again = train(recipe, load_data(recipe, None))
    assert again.scores.test_loss == row["scores"]["test_loss"]
    weights = dict(found.surface(run).model.state_dict())
    assert all(part.equal(weights[name]) for name, part in again.model.state_dict().items())
    surface = found.surface(run)
    for name, estimate in fg.measure(surface, measures=CHEAP, seed=recipe.seed).items():
        assert estimate.value == row["measured"]["measures"][name]["value"]


def test_a_network_that_is_there_is_measured_and_not_trained_again(tmp_path: Path) -> None:
    study = tiny_study()
    study.run(tmp_path)
    before, rows = finished(tmp_path), tmp_path / "rows.jsonl"
    first, *rest = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join(rest))
    study.run(tmp_path, resume=True)
    after, name = finished(tmp_path), json.loads(first)["name"]
    again = after.pop(name)
    assert before.pop(name) != again  # Measured again: its times differ.
    assert before == after
    assert json.loads(first)["scores"] == json.loads(again)["scores"]


def test_what_failed_before_the_first_network_is_begun_again_without_a_word(tmp_path: Path) -> None:
    study = tiny_study(recipe=TINY.but(data="noise"))
    PoolStore(tmp_path).open(study.declaration(), resume=False)
    assert len(study.run(tmp_path).rows) == 8


def test_a_folder_with_a_study_is_not_overwritten(tmp_path: Path) -> None:
    study = tiny_study()
    study.run(tmp_path)
    with pytest.raises(FileExistsError, match="already holds finished networks; continue"):
        study.run(tmp_path)
    with pytest.raises(ValueError, match="holds another pool: it differs in measured"):
        tiny_study(measured=30).run(tmp_path, resume=True)
    with pytest.raises(ValueError, match="`workers=0` must be"):
        study.run(tmp_path / "other", workers=0)


def test_a_study_can_grow(tmp_path: Path) -> None:
    tiny_study(seeds=1, factors={"batch": [8]}).run(tmp_path)
    before = finished(tmp_path)
    larger = tiny_study(seeds=2, factors={"batch": [8, 32]})
    found = larger.run(tmp_path, resume=True)
    assert len(found.rows) == 4
    assert before.items() <= finished(tmp_path).items()
    assert PoolResult.read(tmp_path).pool.runs() == larger.runs()


def test_a_network_that_is_no_longer_what_it_was_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    code = (
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.{}(), nn.Linear(8, 10))"
    )
    file.write_text(code.format("ReLU"))
    recipe = TINY.but(network=f"{file}:net")
    found = tiny_study(recipe=recipe, factors={"batch": [8]}, seeds=1).run(tmp_path / "out")
    (run,) = found.rows
    assert found.surface(run).value() == pytest.approx(found.rows[run]["scores"]["train_loss"])
    file.write_text(code.format("Tanh") + "  # edited")
    with pytest.raises(ValueError, match=r"has .* now: .* are not what they were; bring them back"):
        found.surface(run)


def test_findings_are_read_from_the_folder(tmp_path: Path) -> None:
    found = tiny_study(question="Why?", confounders=["norm"]).run(tmp_path)
    assert PoolResult.read(tmp_path).to_frame().equals(found.to_frame())
    assert repr(PoolResult.read(tmp_path)) == repr(found)
    with pytest.raises(FileNotFoundError, match="holds no pool"):
        PoolResult.read(tmp_path / "nothing")


@pytest.mark.slow
def test_a_failing_worker_fails_as_one_process_does(tmp_path: Path, capfd) -> None:
    file = tmp_path / "net.py"
    file.write_text("import torch\ndef net(): return torch.nn.Linear(3, 10)")  # does not fit
    study = tiny_study(recipe=TINY.but(network=f"{file}:net"))
    with pytest.raises(RuntimeError, match=r"^network `batch-8_rate-0.05_seed-\d_\w+` failed") as e:
        study.run(tmp_path / "out", workers=2)
    assert "Traceback" in str(e.value.__cause__.__cause__)  # That of the other process.
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_workers_end_when_the_one_that_watches_is_killed(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from multiprocessing import active_children\n"
        "from small_studies import TINY, tiny_study\n"
        "told = lambda *_: print(*(child.pid for child in active_children()), flush=True)\n"
        "study = tiny_study(recipe=TINY.but(epochs=10**6))\n"
        f"study.run({str(tmp_path)!r}, workers=2, progress=told)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    children = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.communicate(timeout=60)
    assert len(children) == 2
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, f"{children} still work"
        time.sleep(0.1)


def test_a_run_that_fails_names_itself(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("import torch\ndef net(): return torch.nn.Linear(3, 10)")
    study = tiny_study(recipe=TINY.but(network=f"{file}:net"))
    with pytest.raises(RuntimeError, match=r"network `batch-8_rate-0.05_seed-0_\w+` failed"):
        study.run(tmp_path / "out")


def test_what_diverged_is_kept_marked_and_not_counted(tmp_path: Path) -> None:
    study = tiny_study(factors={"rate": [0.05, 1e30]}, seeds=2)
    found = study.run(tmp_path)
    assert list(found.to_frame()["state"]) == ["reached", "reached", "diverged", "diverged"]
    assert list(found.included_frame["rate"]) == [0.05, 0.05]
    assert "2 diverged: neither measured nor counted." in repr(found)
    assert "The other 2 of 4 count." in repr(found)


def test_what_did_not_reach_its_goal_is_measured_and_not_counted(tmp_path: Path) -> None:
    recipe = TINY.but(loss_goal=1.5, epochs=25)
    study = tiny_study(recipe=recipe, factors={"rate": [1e-6, 0.3]}, seeds=2)
    found = study.run(tmp_path)
    frame = found.to_frame()
    assert list(frame["state"]) == ["not reached", "not reached", "reached", "reached"]
    assert frame["expected_sharpness"].notna().all()
    assert len(found.included_frame) == 2
    assert "2 did not reach a training loss of at most 1.5 within 25 epochs" in repr(found)


def test_nothing_counts(tmp_path: Path) -> None:
    study = tiny_study(recipe=TINY.but(loss_goal=1e-9), factors={"rate": [0.1]}, seeds=2)
    found = study.run(tmp_path)
    assert "no network counts" in repr(found)
    with pytest.raises(ValueError, match="nothing to report"):
        found.write()
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 3
    with pytest.raises(KeyError, match="is no finished network; there are rate"):
        found.surface("no")


def test_the_command_continues_where_nothing_counts(tmp_path: Path) -> None:
    from flatgauge.cli.study import report_pool

    study = tiny_study(recipe=TINY.but(loss_goal=1e-9), factors={"rate": [0.1]}, seeds=2)
    found = study.run(tmp_path)
    said = report_pool(found, "")
    assert said == f"no report, as no network counts; see {tmp_path / 'results.csv'}"
    assert (tmp_path / "results.csv").exists()
    contents = json.loads(found.to_json())
    assert contents["schema"] == "flatgauge/pool/1"
    assert (contents["networks"], contents["counted"]) == (2, 0)
    assert contents["correlations"] is contents["before_after"] is None


def test_the_model_file_says_how_it_was_made(tmp_path: Path) -> None:
    from safetensors import safe_open

    study = tiny_study()
    study.run(tmp_path)
    for run, recipe in study.runs().items():
        with safe_open(tmp_path / "models" / f"{run}.safetensors", framework="pt") as file:
            header = file.metadata()
        assert fg.Recipe.from_dict(json.loads(header["recipe"])) == recipe
        training, row = json.loads(header["training"]), PoolStore(tmp_path).rows()[run]
        assert training == {"state": row["state"], "scores": row["scores"]}


def test_rescaled_networks_are_measured_again(tmp_path: Path) -> None:
    recipe = TINY.but(rescaling="units 1/100..100", dtype="float64")
    found = tiny_study(
        recipe=recipe,
        factors={"rate": [0.1, 0.1001]},
        measures=["fisher_rao_norm", "hessian_trace"],
    ).run(tmp_path)
    plain, again = found.to_frame(), found.rescaled_frame()
    assert again["fisher_rao_norm"].tolist() == pytest.approx(plain["fisher_rao_norm"].tolist())
    ratios = again["hessian_trace"] / plain["hessian_trace"]
    assert ((ratios < 0.5) | (ratios > 2)).all()
    # Nearly the same networks, of the same seeds: factors are each network's own.
    assert len({round(ratio, 2) for ratio in ratios}) == 4


def test_the_global_state_is_left_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    folder = os.getcwd()
    tiny_study().run(tmp_path)
    assert torch.get_rng_state().equal(before)
    assert torch.get_num_threads() == threads
    assert os.getcwd() == folder
