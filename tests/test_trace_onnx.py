"""Tracing ONNX files: the onnx package's real models against an independent count, bad files against one line each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ddltool.analyzers.tracing.onnx_adapter import trace_onnx
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
# Known from the models' definitions: all used floating-point values, and those less the running statistics.
KNOWN = {
    "light_bvlc_alexnet": (60_965_224, 60_965_224),
    "light_densenet121": (8_146_152, 8_062_504),
    "light_inception_v1": (6_998_552, 6_998_552),
    "light_inception_v2": (11_234_792, 11_214_888),
    "light_resnet50": (25_610_152, 25_557_032),
    "light_shufflenet": (1_420_152, 1_393_320),
    "light_squeezenet": (1_235_496, 1_235_496),
    "light_vgg19": (143_667_240, 143_667_240),
    "light_zfnet512": (87_250_536, 87_250_536),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_onnx_packages_models(name: str) -> None:
    path = LIGHT / f"{name}.onnx"
    if not path.is_file():
        pytest.skip("this onnx package ships no light models")
    graph = trace_onnx(str(path))
    every, trainable = KNOWN[name]
    assert graph.meta["parameter_elements"] == every
    assert graph.meta["trainable_elements"] == trainable
    assert graph.parameter_bytes == 4 * every
    ours = sum(op.flops for op in graph.ops() if op.op_type in ("onnx.Conv", "onnx.Gemm"))
    assert ours == counted_independently(path) > 0
    assert sum(op.estimate == "default" for op in graph.ops()) == 0
    assert trace_onnx(str(path)) == graph


def counted_independently(path: Path) -> float:
    """FLOPs of Conv and Gemm from the inferred shapes, in the fewest lines."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True).graph
    shape = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in [*graph.value_info, *graph.output]}
    shape |= {i.name: list(i.dims) for i in graph.initializer}
    total = 0.0
    for node in graph.node:
        if node.op_type == "Conv":
            total += 2.0 * np.prod(shape[node.output[0]]) * np.prod(shape[node.input[1]][1:])
        elif node.op_type == "Gemm":
            total += 2.0 * np.prod(shape[node.output[0]]) * shape[node.input[1]][1]
    return total


def model(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], shape: list[object], out: list[object] | None = None
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def saved(made: onnx.ModelProto, folder: Path) -> str:
    path = folder / "model.onnx"
    path.write_bytes(made.SerializeToString())
    return str(path)


def test_a_small_model_by_hand(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Add", ["c", "c"], ["d"]),
        helper.make_node("Reshape", ["d", "shape"], ["e"]),
        helper.make_node("Relu", ["e"], ["y"], name="Add"),
    ]
    weights = {
        "w": np.zeros((4, 5), np.float32),
        "b": np.zeros(5, np.float16),
        "shape": np.array([-1]),
        "unused": np.ones(3),
    }
    path = saved(model(nodes, weights, ["batch", 4]), tmp_path)
    graph = trace_onnx(path, batch_size=3)
    ops = {op.name: op for op in graph.ops()}
    assert graph.batch_size == 3
    assert {op.parameter: op.size_bytes for op in graph.ops() if op.kind == "recv"} == {"w": 80.0, "b": 10.0}
    assert ops["MatMul"].flops == 2 * 3 * 4 * 5
    assert ops["MatMul"].size_bytes == 4 * (12 + 20 + 15)
    assert ops["MatMul"].inputs == ("recv/w",)
    assert ops["Add"].inputs == ("MatMul", "recv/b")
    assert ops["Add_1"].inputs == ("Add",)
    assert (ops["Reshape"].estimate, ops["Reshape"].size_bytes) == ("free", 0.0)
    assert ops["Add_2"].op_type == "onnx.Relu"  # its own name was taken
    assert trace_onnx(path).batch_size == 1


def test_unknown_ops_count_as_default(tmp_path: Path) -> None:
    nodes = [helper.make_node("Strange", ["x"], ["y"], domain="some.vendor")]
    made = model(nodes, {}, [2, 3], [2, 3])
    made.opset_import.append(helper.make_opsetid("some.vendor", 1))
    graph = trace_onnx(saved(made, tmp_path))
    assert [op.estimate for op in graph.ops()] == ["default"]
    assert graph.op(0).size_bytes == 2 * 24


def test_subgraphs_capture_outer_values(tmp_path: Path) -> None:
    inner = [helper.make_node("Add", ["x", "w"], ["z"])]
    branch = helper.make_graph(inner, "branch", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])])
    nodes = [helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)]
    made = model(nodes, {"w": np.zeros(2, np.float32), "flag": np.array(True)}, [2])
    graph = trace_onnx(saved(made, tmp_path))
    assert graph.op(graph.names.index("If")).inputs == ("recv/w",)


def test_grouped_convolution_and_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], group=2, pads=[1, 1, 1, 1])]
    path = saved(model(nodes, {"w": np.zeros((6, 2, 3, 3), np.float32)}, [1, 4, 8, 8]), tmp_path)
    one, four = trace_onnx(path), trace_onnx(path, batch_size=4)
    assert one.flops[one.kind == COMPUTE].tolist() == [2 * (6 * 8 * 8) * (2 * 3 * 3)]
    assert four.flops.sum() == 4 * one.flops.sum()
    assert len(four.of_kind(RECV)) == 1


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "sub/../../x", ""])
def test_external_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.zeros((4, 5), np.float32)}, [1, 4])
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    with pytest.raises(InputError, match="outside the model's folder; external data must lie beside the model"):
        trace_onnx(saved(made, tmp_path))
    tensor.external_data[0].value = "weights.bin"  # beside the model, but not there: never opened, so no error
    assert trace_onnx(saved(made, tmp_path)).parameter_bytes == 80


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(InputError, match="no such file"):
        trace_onnx(str(path))
    for data in (b"", b"\x00" * 100, b"not a model", b"PK\x03\x04zip"):
        path.write_bytes(data)
        with pytest.raises(InputError, match="is not an ONNX"):
            trace_onnx(str(path))
    with pytest.raises(InputError, match="is a folder"):
        trace_onnx(str(tmp_path))
    whole = model(
        [helper.make_node("Relu", ["x"], ["y"])], {"w": np.zeros(500, np.float32)}, [1, 4]
    ).SerializeToString()
    path.write_bytes(whole[:-300])
    with pytest.raises(InputError, match="is not an ONNX file, or is cut off"):
        trace_onnx(str(path))


def test_a_second_symbolic_dimension(tmp_path: Path) -> None:
    path = saved(model([helper.make_node("Relu", ["x"], ["y"])], {}, ["n", "length"]), tmp_path)
    with pytest.raises(InputError, match=r"dimension 1 of input 'x' has no size \(length\); only the first may be"):
        trace_onnx(path)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_give_one_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.onnx"
    path.write_bytes(data)
    with pytest.raises(InputError, match="random.onnx"):
        trace_onnx(str(path))
