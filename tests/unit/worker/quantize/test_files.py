"""safetensors files written piece by piece are what the library reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from penstock.catalog.weights import Tensor, read_header
from penstock.worker.quantize.files import TensorFile

if TYPE_CHECKING:
    from pathlib import Path

HEADERS = {
    "a.weight_scale": Tensor("BF16", (6, 1), 12),
    "a.weight_packed": Tensor("I32", (6, 3), 72),
    "a.weight_shape": Tensor("I64", (2,), 16),
    "b.weight": Tensor("F8_E4M3", (5, 7), 35),
    "step": Tensor("F32", (), 4),
    "nothing": Tensor("F32", (0, 4), 0),
}


def test_tensors_come_in_pieces_and_in_any_order(tmp_path: Path) -> None:
    tensors = {
        "a.weight_scale": torch.randn(6, 1).bfloat16(),
        "a.weight_packed": torch.randint(-(1 << 31), 1 << 31, (6, 3), dtype=torch.int32),
        "a.weight_shape": torch.tensor([6, 24]),
        "b.weight": torch.randn(5, 7).to(torch.float8_e4m3fn),
        "step": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
    }
    path = tmp_path / "model.safetensors"
    with TensorFile(path, HEADERS) as file:
        for rows in (slice(0, 4), slice(4, 6)):
            for name in ("a.weight_scale", "a.weight_packed"):
                file.write(name, tensors[name][rows])
        file.write("b.weight", tensors["b.weight"].t().contiguous().t())  # laid out otherwise
        for name in ("step", "a.weight_shape", "nothing"):
            file.write(name, tensors[name])
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].double(), tensor.double())
    assert read_header(path) == HEADERS
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        TensorFile(path, HEADERS)
    assert path.read_text() == "mine"
