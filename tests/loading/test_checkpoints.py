"""Weights from files: every layout people save, every way a file can be wrong."""

import copy
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import safetensors.torch
import torch
import zoo
from torch import nn

from flatgauge.loading.models import load_weights


def make(seed: int = 0, classes: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def assert_same(model: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


STATE = make(1).state_dict()
WRAPPED = {f"module.{name}": value for name, value in STATE.items()}
COMPILED = {f"_orig_mod.{name}": value for name, value in STATE.items()}
BOTH = {f"module._orig_mod.{name}": value for name, value in STATE.items()}


@pytest.mark.parametrize(
    ("content", "notes"),
    [
        (STATE, []),
        ({"state_dict": STATE, "epoch": 3}, ["took the weights under `state_dict`"]),
        ({"model_state_dict": STATE, "optimizer": {"state": {}}}, ["`model_state_dict`"]),
        ({"model": STATE, "args": None}, ["`model`"]),
        ({"net": STATE, "acc": 93.1}, ["`net`"]),
        ({"state_dict": [STATE], "acc": 0.9}, ["`state_dict`"]),
        ({"model": {"state_dict": STATE}}, ["`model` → `state_dict`"]),
        (WRAPPED, ["removed the prefix `module.` in 9 names"]),
        (COMPILED, ["removed the prefix `_orig_mod.` in 9 names"]),
        (BOTH, ["prefix `module.` in 9", "prefix `_orig_mod.` in 9"]),
        ({"state_dict": WRAPPED}, ["`state_dict`", "prefix `module.`"]),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_every_layout_of_torch_save(tmp_path, content, notes, zipped):
    path = tmp_path / "weights.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    model = make()
    found = load_weights(model, path)
    assert_same(model, make(1))
    assert len(found) == len(notes)
    assert all(note in text for note, text in zip(notes, found, strict=True))


def test_safetensors(tmp_path):
    safetensors.torch.save_file(WRAPPED, tmp_path / "weights.safetensors")
    model = make()
    notes = load_weights(model, str(tmp_path / "weights.safetensors"))
    assert notes == ["removed the prefix `module.` in 9 names"]
    assert_same(model, make(1))


def test_a_wrapped_model_takes_plain_names(tmp_path):
    torch.save(STATE, tmp_path / "weights.pt")
    model = nn.DataParallel(make())
    notes = load_weights(model, tmp_path / "weights.pt")
    assert notes == ["added the model's own prefix `module.` in 9 names"]
    assert_same(model.module, make(1))


def test_a_layer_that_is_really_called_module(tmp_path):
    class Outer(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.module = make(seed)
            self.weight = nn.Parameter(torch.full((2,), float(seed)))

    for path, state in (("a.pt", Outer(1)), ("b.pt", nn.DataParallel(Outer(1)))):
        torch.save(state.state_dict(), tmp_path / path)
        model = Outer(0)
        load_weights(model, tmp_path / path)
        assert_same(model, Outer(1))


def test_names_that_would_fall_together_are_left_alone(tmp_path):
    class Twice(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), float(seed)))
            self.module = nn.Linear(2, 2, bias=False)
            nn.init.constant_(self.module.weight, 10.0 * seed)

    torch.save(Twice(1).state_dict(), tmp_path / "weights.pt")
    model = Twice(2)
    assert load_weights(model, tmp_path / "weights.pt") == []
    assert_same(model, Twice(1))


def test_the_model_keeps_its_dtype_and_its_parameters(tmp_path):
    torch.save(make(1).bfloat16().state_dict(), tmp_path / "weights.pt")
    model = make()
    before = list(model.parameters())
    notes = load_weights(model, tmp_path / "weights.pt")
    assert notes == ["8 tensors stored as bfloat16 were read as float32"]
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert_same(model, make(1).bfloat16().float())


def test_tied_weights_stored_once(tmp_path):
    def tied(value: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, value)
        return model

    safetensors.torch.save_model(tied(2.0), str(tmp_path / "weights.safetensors"))
    model = tied(1.0)
    assert load_weights(model, tmp_path / "weights.safetensors") == []
    assert_same(model, tied(2.0))


def test_old_batch_norm_without_a_counter(tmp_path):
    torch.save({k: v for k, v in STATE.items() if "tracked" not in k}, tmp_path / "weights.pt")
    model = make()
    assert load_weights(model, tmp_path / "weights.pt") == []
    assert_same(model, make(1))


def test_old_weight_norm_is_translated_by_torch(tmp_path):
    new = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    names = {"bias": "bias", "original0": "weight_g", "original1": "weight_v"}
    old = {names[k.rpartition(".")[2]]: v + 1 for k, v in new.state_dict().items()}
    torch.save(old, tmp_path / "weights.pt")
    load_weights(new, tmp_path / "weights.pt")
    torch.testing.assert_close(new.parametrizations.weight.original0, old["weight_g"])


def change(**changes: object) -> OrderedDict:
    state = OrderedDict(STATE)
    for key, value in changes.items():
        name = key.replace("__", ".").lstrip("_")
        if value is None:
            del state[name]
        else:
            state[name] = value
    return state


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (change(_2__bias=None), r"1 missing from the file: `2.bias` \(3,\)\. Build the model"),
        (change(extra=torch.zeros(2, 7)), r"1 unknown to the model: `extra` \(2, 7\)"),
        ({**STATE, **WRAPPED}, r"9 unknown to the model: `module.0.weight` \(5, 4\)"),
        (change(epoch=3), r"1 unknown to the model: `epoch` int"),
        (
            make(1, classes=4).state_dict(),
            r"2 of another shape: `2.weight` \(4, 5\) in the file, \(3, 5\) in the model, `2.b",
        ),
        (
            {f"layer{k}": v for k, v in STATE.items()},
            r"8 missing .*`1.weight` \(5,\), .*, \.\.\.; 9 unknown to the model: .*, \.\.\.",
        ),
        (change(_2__weight=3), r"of another shape: `2.weight` int in the file, \(3, 5\)"),
    ],
)
def test_weights_that_do_not_fit_leave_the_model_alone(tmp_path, content, message):
    torch.save(content, tmp_path / "weights.pt")
    model = make()
    with pytest.raises(ValueError, match=message):
        load_weights(model, tmp_path / "weights.pt")
    assert_same(model, make())


def test_a_lazy_model(tmp_path):
    torch.save(STATE, tmp_path / "weights.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: lazy modules are new
        model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"`0.weight` of the model has no shape yet; .*call it"):
        load_weights(model, tmp_path / "weights.pt")


class Whole(nn.Linear):
    """A model of this file, for a pickle of the whole model."""


class Bomb:
    def __reduce__(self):
        return os.mkdir, (f"{self.place}/exploded",)


def test_whole_models_and_code_are_refused(tmp_path):
    torch.save(Whole(2, 2), tmp_path / "whole.pt")
    message = (
        r"holds more than numbers: .*test_checkpoints.Whole` would have to be run.*state_dict\("
    )
    with pytest.raises(ValueError, match=message):
        load_weights(Whole(2, 2), tmp_path / "whole.pt")
    bomb = Bomb()
    bomb.place = str(tmp_path)
    torch.save({"state_dict": STATE, "more": bomb}, tmp_path / "bomb.pt")
    with pytest.raises(ValueError, match=r"`\w+.mkdir` would have to be run"):
        load_weights(make(), tmp_path / "bomb.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"state_dict": {}, "more": bomb}))
    with pytest.raises(ValueError, match=r"it cannot be read as plain data"):
        load_weights(make(), tmp_path / "plain.pt")
    assert not (tmp_path / "exploded").exists()


def test_torchscript_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: deprecated, but such files are around
        torch.jit.trace(make().eval(), torch.zeros(1, 4)).save(str(tmp_path / "script.pt"))
    with pytest.raises(ValueError, match=r"is a TorchScript program; needed are weights"):
        load_weights(make(), tmp_path / "script.pt")


LOOP: dict = {}
LOOP["model"] = LOOP


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (3, r"holds `int`; needed are tensors by name"),
        ([STATE, STATE], r"holds `list`; needed"),
        (torch.zeros(3), r"holds `Tensor`; needed"),
        ({}, r"holds nothing; needed are tensors by name"),
        ({"epoch": 3, "loss": 0.1}, r"holds `epoch`, `loss`; .* under one of `state_dict`"),
        ({"state_dict": {"model": {"a": 1}}}, r"\['state_dict'\]\['model'\] holds `a`"),
        ({"model": [3]}, r"\['model'\] holds `int`"),
        (LOOP, r"holds `model`; needed"),
    ],
)
def test_files_without_weights(tmp_path, content, message):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=message):
        load_weights(make(), tmp_path / "weights.pt")


def test_files_that_are_no_checkpoint(tmp_path):
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    (tmp_path / "text.pt").write_text("hello world\n" * 9)
    (tmp_path / "picture.pt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    for name in ("arrays.npz", "text.pt", "picture.pt"):
        with pytest.raises(ValueError, match=r"cut short or not a PyTorch file \(.*download it"):
            load_weights(make(), tmp_path / name)
    header = struct.pack("<Q", 10) + b"not json.."
    for number, content in enumerate((b"abc", header, bytes(99))):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut short or not a safetensors file \("):
            load_weights(make(), path)


@pytest.mark.parametrize("kind", ["zip.pt", "old.pt", "a.safetensors"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.99])
def test_files_cut_short(tmp_path, kind, kept):
    path = tmp_path / kind
    if kind.endswith("safetensors"):
        safetensors.torch.save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=kind == "zip.pt")
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    model = make()
    with pytest.raises(ValueError, match="is cut short or not a"):
        load_weights(model, path)
    assert_same(model, make())


def test_no_file_an_empty_file_a_folder(tmp_path):
    (tmp_path / "empty.pt").touch()
    with pytest.raises(FileNotFoundError, match=r"nowhere.pt` does not exist \(working"):
        load_weights(make(), tmp_path / "nowhere.pt")
    with pytest.raises(ValueError, match=r"empty.pt` is empty; needed are weights"):
        load_weights(make(), tmp_path / "empty.pt")
    with pytest.raises(ValueError, match=r"is a folder; .* it has `empty.pt`"):
        load_weights(make(), tmp_path)


def test_what_was_done_to_other_peoples_files():
    model, _, _ = zoo.resnet(20)
    before = copy.deepcopy(model)
    notes = load_weights(model, zoo.need_data("checkpoints", zoo.ZOO["resnet20"].file))
    assert notes == [
        "took the weights under `state_dict`",
        f"removed the prefix `module.` in {5 * 19 + 2} names",
    ]
    with pytest.raises(ValueError, match=r"missing .*; \d+ unknown to the model"):
        load_weights(before, zoo.need_data("checkpoints", zoo.ZOO["lenet"].file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.to("meta"), "2 without values .saved on the device meta.: `weight`"),
        (lambda value: value.to_sparse(), "2 sparse or quantized .* `weight`, `bias`"),
        (lambda value: value.to(torch.complex64), "2 complex, where the model's are real"),
    ],
)
def test_tensors_that_hold_no_plain_numbers(tmp_path, change, message):
    model, path = nn.Linear(3, 2), tmp_path / "a.pt"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save({name: change(value) for name, value in before.items()}, path)
    with pytest.raises(ValueError, match=message):
        load_weights(model, path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_paths_that_lead_to_no_file(tmp_path, monkeypatch):
    model = nn.Linear(3, 2)
    with pytest.raises(FileNotFoundError, match="n` does not exist"):
        load_weights(model, tmp_path / ("n" * 300))
    with pytest.raises(FileNotFoundError, match=r"`~no-such-user/a.pt` does not exist"):
        load_weights(model, "~no-such-user/a.pt")
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(ValueError, match="is a pipe or a device; needed is a file"):
        load_weights(model, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="you may not; change its permissions"):
        load_weights(model, tmp_path / "b.pt")


def test_an_archive_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(ValueError, match=r"not a PyTorch file .it cannot be read as plain data"):
        load_weights(nn.Linear(3, 2), tmp_path / "a.pt")


def test_a_flipped_byte_is_refused(tmp_path):
    model = nn.Linear(40, 30)
    path = tmp_path / "a.pt"
    torch.save(model.state_dict(), path)
    contents = bytearray(path.read_bytes())
    place = contents.index(model.weight.detach().numpy().tobytes()[:64]) + 21
    contents[place] ^= 1
    path.write_bytes(contents)
    before = model.weight.detach().clone()
    with pytest.raises(
        ValueError, match=r"is damaged: `a/data/0` in it does not have the checksum"
    ):
        load_weights(model, path)
    assert torch.equal(model.weight, before)


def test_files_without_checksums_are_read(tmp_path):
    saved, model = nn.Linear(4, 3), nn.Linear(4, 3)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(saved.state_dict(), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    load_weights(model, tmp_path / "a.pt")
    assert torch.equal(model.weight, saved.weight)


def test_weights_need_a_model_with_memory(tmp_path):
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"`weight` of the model is on the device `meta`"):
        load_weights(nn.Linear(4, 3, device="meta"), tmp_path / "a.pt")
