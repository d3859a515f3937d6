"""Tracing ONNX files: the onnx package's real models against an independent count, bad files against one line each."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.tracing.onnx_adapter import trace_onnx
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV
from ddltool.shipped import calibration, devices

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
# Known from the models' definitions: all used floating-point values, and those less the running statistics.
KNOWN = {
    **{"light_bvlc_alexnet": (60_965_224, 60_965_224), "light_densenet121": (8_146_152, 8_062_504)},
    **{"light_inception_v1": (6_998_552, 6_998_552), "light_inception_v2": (11_234_792, 11_214_888)},
    **{"light_resnet50": (25_610_152, 25_557_032), "light_shufflenet": (1_420_152, 1_393_320)},
    "light_squeezenet": (1_235_496, 1_235_496),
    **{"light_vgg19": (143_667_240, 143_667_240), "light_zfnet512": (87_250_536, 87_250_536)},
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


def test_a_convolution_takes_as_long_as_torchs(tmp_path: Path) -> None:
    """One layer of 3.7 GFLOP, from a file and from a module: the same kernel on the same device."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    path = saved(model(nodes, {"w": np.zeros((64, 64, 3, 3), np.float32)}, [16, 64, 56, 56]), tmp_path)
    step = TrainingStep(
        name="one",
        module=nn.Conv2d(64, 64, 3, padding=1, bias=False),
        inputs=(torch.zeros(16, 64, 56, 56),),
        loss=default_loss,
    )
    numbers = cost_model(devices().device("V100"), calibration())
    ours = numbers.step(trace_onnx(path)).device_s
    torchs = numbers.step(trace_torch(lambda: step, mode="inference")).device_s
    assert ours == pytest.approx(torchs, rel=1e-6)


@pytest.mark.parametrize(
    ("nodes", "opset", "problem"),
    [
        ([helper.make_node("Conv", ["x", "w"], ["y"], strides=[0, 1])], 17, "strides of Conv '' has 0"),
        ([helper.make_node("Conv", ["x", "w"], ["y"], dilations=[1, -1])], 17, "dilations of Conv '' has -1"),
        ([helper.make_node("Conv", ["x", "w"], ["y"], group=0)], 17, "group of Conv '' has 0"),
        ([helper.make_node("Conv", ["x", "w"], ["y"])], 0, "is of operator set 0; export it for one of 1 to "),
        ([helper.make_node("Conv", ["x", "w"], ["y"])], 10**6, "is of operator set 1000000"),
    ],
)
def test_numbers_that_no_model_has(tmp_path: Path, nodes: list[onnx.NodeProto], opset: int, problem: str) -> None:
    made = model(nodes, {"w": np.ones((1, 1, 1, 1), np.float32)}, shape=[1, 1, 4, 4], out=[1, 1, 4, 4])
    made.opset_import[0].version = opset
    with pytest.raises(InputError, match=re.escape(problem)):
        trace_onnx(saved(made, tmp_path))


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
    path = saved(model(nodes, {"w": np.zeros((6, 2, 3, 3), np.float32)}, ["n", 4, 8, 8]), tmp_path)
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
    path = saved(model([helper.make_node("Relu", ["x"], ["y"])], {}, ["n", "length", 3]), tmp_path)
    with pytest.raises(InputError, match=r"without a size: length \(x\[1\]\); give them with --bind length=SIZE"):
        trace_onnx(path)
    with pytest.raises(InputError, match=r"has a dimension 'lenght'; did you mean \"length\"\? \(known: length, n\)"):
        trace_onnx(path, bindings={"lenght": 5})
    with pytest.raises(InputError, match="length is 0; it must be at least 1"):
        trace_onnx(path, bindings={"length": 0})
    for bindings, batch_size in (({"length": 5}, 4), ({"length": 5, "n": 4}, None)):
        graph = trace_onnx(path, bindings=bindings, batch_size=batch_size)
        assert graph.batch_size == 4
        assert graph.flops.sum() == 4 * 5 * 3


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("FILE", "length", "--bind: 'length' is not NAME=SIZE; for example batch=8,sequence=128"),
        ("FILE", "n=1,n=2", "--bind: gives n twice"),
        ("FILE", "n=2", "has dimensions without a size: length (x[1]); give them with --bind length=SIZE"),
        (
            "zoo:cifarnet",
            "n=2",
            "--bind: zoo:cifarnet has no symbolic dimensions; leave it out: only ONNX files have them",
        ),
    ],
)
@pytest.mark.parametrize("more", [[], ["--determinism"]])
def test_bindings_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, text: str, message: str, more: list[str]
) -> None:
    from ddltool.commands.main import run

    path = saved(model([helper.make_node("Relu", ["x"], ["y"])], {}, ["n", "length"]), tmp_path)
    assert run(["trace", source.replace("FILE", path), "--bind", text, *more]) == 2
    assert message in capsys.readouterr().err
    assert run(["trace", path, "--bind", "n=2,length=3", *more]) == 0


def test_a_dimension_without_a_name(tmp_path: Path) -> None:
    path = saved(model([helper.make_node("Relu", ["x"], ["y"])], {}, ["n", None]), tmp_path)
    with pytest.raises(InputError, match=r"--bind x.1=SIZE"):
        trace_onnx(path)
    assert trace_onnx(path, bindings={"x.1": 7}).flops.sum() == 7


@given(st.binary(max_size=200))
def test_random_bytes_give_one_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.onnx"
    path.write_bytes(data)
    with pytest.raises(InputError, match="random.onnx"):
        trace_onnx(str(path))


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def shuffle(batch: int) -> onnx.ModelProto:
    """Channel shuffle and a flattening by [batch, -1]: the batch leads every target."""
    nodes = [
        helper.make_node("Reshape", ["x", "groups"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3, 4]),
        helper.make_node("Reshape", ["b", "channels"], ["c"]),
        helper.make_node("Conv", ["c", "k"], ["d"]),
        helper.make_node("Reshape", ["d", "flat"], ["e"]),
        helper.make_node("Gemm", ["e", "w"], ["y"]),
    ]
    weights = {
        **{"groups": int64(batch, 2, 4, 5, 5), "channels": int64(batch, 8, 5, 5), "flat": int64(batch, -1)},
        **{"k": np.zeros((6, 8, 3, 3), np.float32), "w": np.zeros((54, 10), np.float32)},
    }
    return model(nodes, weights, [batch, 8, 5, 5])


def test_a_symbolic_batch_with_a_constant_target(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["a"], name="flat"),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    path = saved(model(nodes, {"shape": int64(4, 6), "w": np.zeros((6, 5), np.float32)}, ["n", 2, 3]), tmp_path)
    with pytest.raises(InputError, match=r"node 'flat' \(Reshape\) reshapes 1x2x3 to 4x6; give the batch size"):
        trace_onnx(path)
    with pytest.raises(InputError, match=r"node 'flat' \(Reshape\) reshapes"):
        trace_onnx(path, batch_size=8)
    assert trace_onnx(path, batch_size=4).flops.sum() == 2 * 4 * 6 * 5
    path = saved(model(nodes, {"shape": int64(1, 6), "w": np.zeros((6, 5), np.float32)}, ["n", 2, 3]), tmp_path)
    graph = trace_onnx(path)
    assert graph.batch_size == 1
    assert "the batch dimension is symbolic and taken as 1" in str(graph.meta["note"])
    assert graph.flops.sum() == 2 * 6 * 5
    with pytest.raises(InputError, match=r"node 'flat' \(Reshape\) reshapes 8x2x3 to 1x6; give the batch size"):
        trace_onnx(path, batch_size=8)
    path = saved(model(nodes, {"shape": int64(0, -1), "w": np.zeros((6, 5), np.float32)}, ["n", 2, 3]), tmp_path)
    assert trace_onnx(path, batch_size=8).flops.sum() == 8 * 2 * 6 * 5


def test_a_symbolic_batch_need_not_be_proportional(tmp_path: Path) -> None:
    nodes = [helper.make_node("Transpose", ["x"], ["a"]), helper.make_node("MatMul", ["x", "a"], ["y"])]
    graph = trace_onnx(saved(model(nodes, {}, ["n", 6]), tmp_path), batch_size=8)  # every sample with every other
    assert graph.flops.sum() == 2 * 8 * 8 * 6


def test_the_batch_symbol_in_another_place(tmp_path: Path) -> None:
    made = model([helper.make_node("MatMul", ["h", "x"], ["y"])], {}, ["n", 4])
    made.graph.input.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [3, "n"]))
    assert trace_onnx(saved(made, tmp_path), batch_size=5).flops.sum() == 2 * 3 * 4 * 5


@pytest.mark.parametrize("batch", [0, -1, -8, 10**30])
def test_a_batch_size_out_of_range(tmp_path: Path, batch: int) -> None:
    for shape in ([2, 4], ["n", 4]):
        with pytest.raises(InputError, match=f"--batch-size: is {batch}; it must be at least 1"):
            trace_onnx(saved(model([helper.make_node("Relu", ["x"], ["y"])], {}, shape), tmp_path), batch_size=batch)


def test_a_fixed_batch_stays_what_it_is(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    path = saved(model(nodes, {}, [2, 4]), tmp_path)
    assert trace_onnx(path) == trace_onnx(path, batch_size=2)
    assert trace_onnx(path).batch_size == 2
    with pytest.raises(
        InputError, match=r"--batch-size: is 8, but .* has a fixed batch of 2; leave it out, or export with a symbolic"
    ):
        trace_onnx(path, batch_size=8)
    path = saved(model(nodes, {}, ["n", 4]), tmp_path)
    with pytest.raises(InputError, match=r"--batch-size: is 8, but .* has a fixed batch of 3"):
        trace_onnx(path, batch_size=8, bindings={"n": 3})


def test_a_batch_size_without_a_batch(tmp_path: Path) -> None:
    path = saved(model([helper.make_node("Relu", ["x"], ["y"])], {}, []), tmp_path)
    assert trace_onnx(path).batch_size is None
    with pytest.raises(InputError, match="no input of .* has a batch dimension; leave it out"):
        trace_onnx(path, batch_size=2)


def scaled_up(opset: int) -> onnx.ModelProto:
    """A picture made twice as high and three times as wide in the way of that operator set, then convolved."""
    scales = np.array([1, 1, 2, 3], np.float32)
    kernel = np.zeros((5, 2, 3, 3), np.float32)
    convolve = helper.make_node("Conv", ["a", "k"], ["y"], pads=[1, 1, 1, 1])
    if opset == 9:
        up = helper.make_node("Upsample", ["x", "s"], ["a"])
    else:
        up = helper.make_node("Resize", ["x", "s"] if opset == 10 else ["x", "", "s"], ["a"])
    made = model([up, convolve], {"s": scales, "k": kernel}, ["n", 2, 4, 4])
    made.opset_import[0].version = opset
    return made


@pytest.mark.parametrize("opset", [9, 10, 11, 13, 19])
def test_resize_by_constant_scales(tmp_path: Path, opset: int) -> None:
    path = saved(scaled_up(opset), tmp_path)
    for batch in (1, 3):
        graph = trace_onnx(path, batch_size=batch)
        convolution = graph.op(graph.op_type.index("onnx.Conv"))
        assert convolution.flops == 2 * (batch * 5 * 8 * 12) * (2 * 3 * 3)
        assert graph.op(len(graph) - 2).size_bytes >= 4 * batch * (2 * 4 * 4 + 2 * 8 * 12)
        assert [op.parameter for op in graph.ops() if op.kind == "recv"] == ["k"]  # scales are no parameters


def test_resize_by_computed_sizes(tmp_path: Path) -> None:
    """Sizes that go through floating point, as exporters write ``interpolate``; the constant scale is a node."""
    nodes = [
        helper.make_node("Shape", ["x"], ["all"]),
        helper.make_node("Slice", ["all", "two", "four"], ["hw"]),
        helper.make_node("Cast", ["hw"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Constant", [], ["scale"], value_floats=[1.5, 2.5]),
        helper.make_node("Mul", ["f", "scale"], ["g"]),
        helper.make_node("Floor", ["g"], ["floor"]),
        helper.make_node("Cast", ["floor"], ["new"], to=TensorProto.INT64),
        helper.make_node("Slice", ["all", "zero", "two"], ["nc"]),
        helper.make_node("Concat", ["nc", "new"], ["sizes"], axis=0),
        helper.make_node("Resize", ["x", "", "", "sizes"], ["a"]),
        helper.make_node("Conv", ["a", "k"], ["y"]),
    ]
    weights = {"zero": int64(0), "two": int64(2), "four": int64(4), "k": np.zeros((5, 2, 1, 1), np.float32)}
    path = saved(model(nodes, weights, ["n", 2, 5, 5]), tmp_path)
    for batch in (1, 3):
        graph = trace_onnx(path, batch_size=batch)
        assert graph.op(graph.op_type.index("onnx.Conv")).flops == 2 * (batch * 5 * 7 * 12) * 2


def test_nodes_in_any_order(tmp_path: Path) -> None:
    made = shuffle(2)
    ordered = trace_onnx(saved(made, tmp_path))
    nodes = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend(reversed(nodes))
    graph = trace_onnx(saved(made, tmp_path))
    assert "were not in topological order" in str(graph.meta["note"])
    assert list(graph.ops()) == list(ordered.ops())
    assert "note" not in ordered.meta
    assert len(graph.input_index) == 5 + 2  # the chain of six nodes, and two weights


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    missing = [helper.make_node("Add", ["x", "nowhere"], ["y"], name="sum")]
    with pytest.raises(InputError, match=r"node 'sum' \(Add\) reads 'nowhere', which nothing makes; an input must be"):
        trace_onnx(saved(model(missing, {}, [2]), tmp_path))
    inner = [helper.make_node("Add", ["x", "nowhere"], ["z"])]
    branch = helper.make_graph(inner, "branch", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])])
    nodes = [helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)]
    with pytest.raises(InputError, match=r"node 'y' \(If\) reads 'nowhere', which nothing makes"):
        trace_onnx(saved(model(nodes, {"flag": np.array(True)}, [2]), tmp_path))
    twice = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"], name="again")]
    with pytest.raises(InputError, match=r"node 'again' \(Abs\) makes 'y', which exists already"):
        trace_onnx(saved(model(twice, {}, [2]), tmp_path))
    loop = [
        helper.make_node("Relu", ["b"], ["y"], name="behind"),
        helper.make_node("Add", ["x", "b"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="second"),
    ]
    with pytest.raises(InputError, match=r"node '(first|second)' \(\w+\) reads its own output"):
        trace_onnx(saved(model(loop, {}, [2]), tmp_path))


def parameters(made: onnx.ModelProto, folder: Path) -> tuple[dict[str, float], str]:
    graph = trace_onnx(saved(made, folder))
    return {op.parameter or "": op.size_bytes for op in graph.ops() if op.kind == "recv"}, str(graph.meta["dtype"])


def test_quantise_and_dequantise_around_a_convolution(tmp_path: Path) -> None:
    """Weight and bias are stored quantised and computed in float32; scales and zero points are no parameters."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xf"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], axis=0),
        helper.make_node("DequantizeLinear", ["b", "s"], ["bf"]),
        helper.make_node("Conv", ["xf", "wf", "bf"], ["y"]),
    ]
    weights = {
        **{"s": np.array(0.1, np.float32), "z": np.array(3, np.uint8), "w": np.zeros((6, 2, 3, 3), np.int8)},
        **{"ws": np.ones(6, np.float32), "wz": np.zeros(6, np.int8), "b": np.zeros(6, np.int32)},
    }
    made = model(nodes, weights, [1, 2, 5, 5])
    assert parameters(made, tmp_path) == ({"w": 108.0, "b": 24.0}, "float32")
    graph = trace_onnx(saved(made, tmp_path))
    assert graph.meta["parameter_elements"] == 114
    assert graph.op(graph.op_type.index("onnx.Conv")).flops == 2 * (6 * 3 * 3) * (2 * 3 * 3)


def test_integer_arithmetic(tmp_path: Path) -> None:
    zero, scale = np.array(0, np.uint8), np.array(0.5, np.float32)
    weights = {"z": zero, "s": scale, "w": np.zeros((6, 2, 3, 3), np.uint8), "b": np.zeros(6, np.int32)}
    quantise = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])
    dequantise = helper.make_node("DequantizeLinear", ["p", "s", "z"], ["y"])
    nodes = [
        quantise,
        helper.make_node("QLinearConv", ["q", "s", "z", "w", "s", "z", "s", "z", "b"], ["p"]),
        dequantise,
    ]
    assert parameters(model(nodes, weights, [1, 2, 5, 5]), tmp_path) == ({"w": 108.0, "b": 24.0}, "int8")
    graph = trace_onnx(saved(model(nodes, weights, ["n", 2, 5, 5]), tmp_path), batch_size=4)
    assert graph.op(graph.op_type.index("onnx.QLinearConv")).flops == 2 * (4 * 6 * 3 * 3) * (2 * 3 * 3)
    nodes[1:] = [
        helper.make_node("ConvInteger", ["q", "w", "z", "z"], ["p"]),
        helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT),
    ]
    assert parameters(model(nodes, weights, [1, 2, 5, 5]), tmp_path) == ({"w": 108.0}, "int8")
    weights["m"] = np.zeros((5, 7), np.uint8)
    nodes[1:] = [helper.make_node("QLinearMatMul", ["q", "s", "z", "m", "s", "z", "s", "z"], ["p"]), dequantise]
    assert parameters(model(nodes, weights, [3, 5]), tmp_path) == ({"m": 35.0}, "int8")
    graph = trace_onnx(saved(model(nodes, weights, [3, 5]), tmp_path))
    assert graph.op(graph.op_type.index("onnx.QLinearMatMul")).flops == 2 * 3 * 5 * 7


def test_zero_points_do_not_decide_the_type(tmp_path: Path) -> None:
    """More zero points than weights: the arithmetic is float32 all the same."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a0"])]
    weights = {"w": np.zeros((4, 4), np.float32), "s": np.array(0.5, np.float32)}
    for layer in range(3):
        weights[f"z{layer}"] = np.array(layer, np.int8)
        nodes.append(helper.make_node("QuantizeLinear", [f"a{layer}", "s", f"z{layer}"], [f"q{layer}"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"q{layer}", "s", f"z{layer}"], [f"a{layer + 1}"]))
    nodes.append(helper.make_node("Relu", ["a3"], ["y"]))
    assert parameters(model(nodes, weights, [32, 4]), tmp_path) == ({"w": 64.0}, "float32")


def test_four_bit_weights_are_packed(tmp_path: Path) -> None:
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["f"]), helper.make_node("MatMul", ["x", "f"], ["y"])]
    made = model(nodes, {"s": np.array(0.5, np.float32)}, [2, 3])
    made.opset_import[0].version = 21
    made.graph.initializer.append(helper.make_tensor("w", TensorProto.INT4, [3, 5], [1] * 15))
    assert parameters(made, tmp_path) == ({"w": 8.0}, "float32")


def test_long_vectors_beside_computed_sizes(tmp_path: Path) -> None:
    """Native propagation of sizes would take gigabytes for this vector."""
    nodes = [
        helper.make_node("Add", ["v", "v"], ["u"]),
        helper.make_node("Shape", ["x"], ["all"]),
        helper.make_node("Slice", ["all", "zero", "one"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["flat"], axis=0),
        helper.make_node("Reshape", ["x", "flat"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    weights = {"zero": int64(0), "one": int64(1), "rest": int64(-1), "w": np.zeros((6, 5), np.float32)}
    made = model(nodes, weights, [3, 2, 3])
    made.graph.input.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, [2**40]))
    graph = trace_onnx(saved(made, tmp_path))
    assert graph.op(graph.op_type.index("onnx.MatMul")).flops == 2 * 3 * 6 * 5
    assert graph.flops.sum() == 2**40 + 2 * 3 * 6 * 5


def test_claims_that_no_file_can_keep(tmp_path: Path) -> None:
    made = model([helper.make_node("Expand", ["x", "sizes"], ["y"])], {}, [2, 3])
    made.graph.input.append(helper.make_tensor_value_info("sizes", TensorProto.INT64, [2**40]))  # no memory is taken
    note = str(trace_onnx(saved(made, tmp_path)).meta["note"])
    assert "1 of 1 nodes make a tensor of unknown shape (first: node 'y' (Expand))" in note
    made = model([helper.make_node("Add", ["x", "w"], ["y"])], {"w": np.zeros(3, np.float32)}, [2, 3])
    made.graph.initializer[0].data_type = 99
    with pytest.raises(InputError, match="tensor 'w' has the element type 99, which this onnx package does not know"):
        trace_onnx(saved(made, tmp_path))


def test_notes_on_what_is_not_counted(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["a"], name="where"), helper.make_node("Relu", ["a"], ["y"])]
    note = str(trace_onnx(saved(model(nodes, {}, [2, 4]), tmp_path)).meta["note"])
    assert "2 of 2 nodes make a tensor of unknown shape (first: node 'where' (NonZero))" in note
    inner = [helper.make_node("Add", ["x", "x"], ["z"])]
    branch = helper.make_graph(inner, "branch", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])])
    nodes = [helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)]
    note = str(trace_onnx(saved(model(nodes, {"flag": np.array(True)}, [2]), tmp_path)).meta["note"])
    assert "the work inside node 'y' (If)'s subgraphs is not counted" in note


def test_a_small_tensor_in_a_missing_side_file(tmp_path: Path) -> None:
    """Its values cannot be known: the shape behind it is told to be unknown, not invented."""
    made = model(
        [helper.make_node("Reshape", ["x", "shape"], ["a"]), helper.make_node("Relu", ["a"], ["y"])],
        {"shape": int64(6, 2)},
        [3, 4],
    )
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    graph = trace_onnx(saved(made, tmp_path))
    assert "unknown shape (first: node 'a' (Reshape))" in str(graph.meta["note"])
