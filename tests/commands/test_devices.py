"""The device table against arithmetic and known bounds, names however written, a user's own devices, ``ddltool devices``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltool.analyzers.step.costs.model import cost_model
from ddltool.device import Device, DeviceTable, name_key
from ddltool.errors import InputError
from ddltool.job import read_job
from ddltool.shipped import calibration, devices, devices_of, known_devices, with_specs
from tests.conftest import Cli, job, write

TABLE = devices()
# Lanes for float32 of one multiprocessor (NVIDIA's whitepapers, AMD's CDNA papers; a core with two AVX-512 units).
LANES = {
    **{"Kepler": 192, "Maxwell": 128, "Pascal": 128, "Volta": 64, "Turing": 64, "Ampere": 128, "Ada": 128},
    **{"Hopper": 128, "Blackwell": 128, "CDNA": 64, "CDNA2": 64, "CDNA3": 128, "CDNA4": 128, "CPU": 32},
}
HALF_THE_LANES = {"P100", "P100-SXM2", "A100", "A100-80GB", "A100-PCIe", "A100-PCIe-80GB", "A800", "A30"}
# Bounds of memory bandwidth in GB/s by architecture, from the smallest card to the largest.
BANDWIDTH = {
    **{"Kepler": (100, 400), "Maxwell": (100, 400), "Pascal": (150, 750), "Volta": (850, 1150), "Turing": (300, 700)},
    **{"Ampere": (190, 2100), "Ada": (250, 1050), "Hopper": (1900, 5000), "Blackwell": (900, 8100)},
    **{"CDNA": (1200, 1300), "CDNA2": (1600, 1700), "CDNA3": (5000, 6100), "CDNA4": (7000, 8100), "CPU": (1, 20)},
}
# Where float16 products accumulate in float32 at half the rate of float16 accumulation.
HALVED = {"RTX2080Ti", "A10G", "L40"}


def is_halved(device: Device) -> bool:
    return device.name in HALVED or "GeForce" in device.title


@pytest.mark.parametrize("device", TABLE.devices, ids=lambda device: device.name)
def test_figures_agree_with_each_other(device: Device) -> None:
    peaks, architecture = device.peak_flops, device.architecture
    lanes = LANES[architecture] // (2 if device.name in HALF_THE_LANES else 1)
    computed = 2 * lanes * device.multiprocessors * device.clock_hz
    assert peaks["float32"] == pytest.approx(computed, rel=0.12)
    low, high = BANDWIDTH[architecture]
    assert low <= device.memory_bytes_per_s / 1e9 <= high
    assert peaks.get("float64", 0) <= peaks["float32"]
    order = [peaks[name] for name in ("float32", "tf32", "float16", "float8", "float4") if name in peaks]
    assert order == sorted(order)
    assert peaks.get("bfloat16", peaks.get("float16")) in (peaks.get("float16"), peaks.get("float16", 0) / 2)
    if architecture in ("Ampere", "Ada", "Hopper", "Blackwell", "CDNA3"):
        assert peaks["float16"] == peaks["bfloat16"] == pytest.approx(2 * peaks["tf32"], rel=0.02)
    if architecture in ("Turing", "Ampere", "Ada") and device.name not in HALF_THE_LANES:
        full = 8 if architecture == "Turing" else 4
        assert peaks["float16"] / peaks["float32"] == pytest.approx(full / (1 + is_halved(device)), rel=0.02)
    assert ("float8" in peaks) == (architecture in ("Ada", "Hopper", "Blackwell", "CDNA3", "CDNA4"))
    if architecture != "CPU":
        assert 2**20 <= device.l2_bytes <= 2**28
        assert 50 <= device.power_w <= 1400
        assert 15e9 < device.link_bytes_per_s <= 900e9
        by_slot = {"3.0": 15.75e9, "4.0": 31.5e9, "5.0": 63e9}
        if device.link.startswith("PCIe") and device.name != "A2":
            assert device.link_bytes_per_s == by_slot[device.link.split()[1]]
    assert device.source != "given by the user"
    assert device.title
    assert device.price_per_hour is None


def test_the_table_has_what_is_in_use() -> None:
    names = [device.name for device in TABLE.devices]
    wanted = """K80 M60 P4 P40 P100 P100-SXM2 V100 V100-32GB V100-PCIe V100-PCIe-32GB T4 RTX2080Ti TitanRTX QuadroRTX8000
        QuadroRTX6000 A10 A10G A16 A30 A40 A2 A4000 A5000 A6000 RTX3060 RTX3070 RTX3080 RTX3090 RTX4070Ti RTX4080 RTX4090
        RTX5080 RTX5090 RTX6000Ada RTX4000Ada L4 L40 L40S A100 A100-80GB A100-PCIe A100-PCIe-80GB A800 H100 H100-PCIe
        H100-NVL H200 GH200 B200 GB200 B300 MI100 MI210 MI250X MI300X cpu-core"""
    assert set(wanted.split()) <= set(names)
    spellings = [
        name_key(each) for device in TABLE.devices for each in {name_key(n) for n in (device.name, *device.aliases)}
    ]
    assert len(set(spellings)) == len(spellings), "two devices answer to one name"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *(("NVIDIA A100-SXM4-40GB", "A100"), ("A100-40GB", "A100"), ("Tesla V100-SXM2-16GB", "V100")),
        *(("NVIDIA GeForce RTX 3090", "RTX3090"), ("geforce_rtx_2080_ti", "RTX2080Ti"), ("Tesla T4", "T4")),
        *(("NVIDIA H100 80GB HBM3", "H100"), ("AMD Instinct MI300X", "MI300X"), ("v-100", "V100")),
        *(("NVIDIA RTX A6000", "A6000"), ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"), ("CPU core", "cpu-core")),
    ],
)
def test_names_however_written(written: str, name: str) -> None:
    assert TABLE.device(written).name == name


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    assert name_key("NVIDIA") == "nvidia"
    no_gpu = "cpu is no GPU, and the steps of a CPU are measured, not predicted; ddltool profile SOURCE"
    for name, message in (
        ("cpu", no_gpu),
        ("V1000", 'unknown device .V1000.; did you mean "V100"'),
        ("", "unknown device ''"),
    ):
        with pytest.raises(InputError, match=f"--device: {message}"):
            TABLE.device(name)


def test_types_without_a_figure_run_at_the_float32_rate() -> None:
    card, h100 = TABLE.device("P40"), TABLE.device("H100")
    assert card.peak_for("float16") == card.peak_for("no such type") == 12e12
    assert h100.peak_for("float8_e4m3fn") == 1978.9e12


PLAIN = "{name: box, peak_flops: {float32: 1e12}, memory_bytes_per_s: 5e11, memory_gib: 8}"


def table_of(folder: Path, *entries: str) -> Path:
    return write(folder / "mine.yaml", "devices:", *(f"- {entry}" for entry in entries))


def test_an_old_entry_is_a_whole_one(tmp_path: Path) -> None:
    table = known_devices(table_of(tmp_path, PLAIN))
    box = table.device("BOX")
    assert (box.title, box.source, box.architecture, box.multiprocessors) == ("", "given by the user", "", 0)
    assert (box.l2_bytes, box.link_bytes_per_s, box.price_per_hour) == (0, 0, None)
    assert len(table.devices) == len(TABLE.devices) + 1
    again = tmp_path / "mine.json"
    again.write_text(json.dumps(table.model_dump(mode="json")))
    assert known_devices(again).device("box") == box


def test_like_takes_over_all_that_is_not_said(tmp_path: Path) -> None:
    path = table_of(
        tmp_path,
        "{name: a100, like: A100, memory_gib: 20, peak_flops: {float16: 156e12}}",
        "{name: twin, like: a100, price_per_hour: 2, title: Twin}",
    )
    table, shipped = known_devices(path), TABLE.device("A100")
    mine, twin = table.device("A100"), table.device("twin")
    assert mine.model_dump(exclude={"name", "memory_gib", "peak_flops", "source", "title", "aliases"}) == (
        shipped.model_dump(exclude={"name", "memory_gib", "peak_flops", "source", "title", "aliases"})
    )
    assert mine.peak_flops == {**shipped.peak_flops, "float16": 156e12, "bfloat16": 156e12}  # one rate for both
    for entry, rates in (
        ("like: A100, peak_flops: {bfloat16: 1e14}", (1e14, 1e14)),
        ("like: A100, peak_flops: {float16: 1e14, bfloat16: 5e13}", (1e14, 5e13)),
        ("like: V100, peak_flops: {float16: 1e14}", (1e14, None)),  # it has none in bfloat16
    ):
        own = known_devices(table_of(tmp_path, f"{{name: own, {entry}}}")).device("own").peak_flops
        assert (own["float16"], own.get("bfloat16")) == rates
    assert (mine.memory_gib, mine.title, mine.aliases, mine.source) == (20, "", [], "given by the user, like A100")
    assert (twin.memory_gib, twin.price_per_hour, twin.title) == (20, 2, "Twin")
    assert sum(name_key(device.name) == "a100" for device in table.devices) == 1, (
        "the user's takes the shipped one's place"
    )


@pytest.mark.parametrize(
    ("entry", "residuals"),
    [
        ("{name: A100, like: A100}", "device"),
        ("{name: a100, like: A100, memory_gib: 20, price_per_hour: 2}", "device"),
        ("{name: A100, like: A100, memory_bytes_per_s: 8e11}", "generation"),
        ("{name: A100, like: A100, source: my own bench, peak_flops: {float16: 1e14}}", "generation"),
        (PLAIN.replace("box", "A100, architecture: Pascal"), "unknown"),
        ("{name: half, like: A100}", "generation"),
    ],
)
def test_only_the_shipped_figures_were_measured(entry: str, residuals: str, tmp_path: Path) -> None:
    device = known_devices(table_of(tmp_path, entry)).devices[0]
    assert cost_model(device, calibration()).residuals == calibration().residuals[residuals]  # type: ignore[index]


def test_what_was_measured_on_a_device_is_not_of_one_like_it(tmp_path: Path) -> None:
    fitted = "{units: {tensor: 1, vector: 1, memory: 0.5}, issue_s: 1e-5, start_s: 1e-5, update_s: 1e-5, source: rows, "
    fitted += "residuals: {low: 0.8, high: 1.2, median_error: 0.1, rows: 5, what: rows}}"
    table = known_devices(
        table_of(tmp_path, f"{{name: mine, like: A10, fitted: {fitted}}}", "{name: other, like: mine}")
    )
    assert table.device("mine").fitted is not None
    assert table.device("other").fitted is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: box, like: A1000}", r"devices\[0\].like: unknown device 'A1000'; did you mean \"A100\""),
        ("{name: box, like: 3}", r"devices\[0\].like: is 3; give the name of a known device"),
        ("{name: box, like: A100, architecture: Rubin}", r"devices\[0\].architecture: is 'Rubin'; give .*'Kepler'"),
        ("{name: box, like: A100, peak_flops: {fp16: 1e12}}", r"peak_flops: names the type 'fp16'; .*float16"),
        ("{name: box, like: A100, peak_flops: {float16: 0}}", r"peak_flops.float16: is 0; give a number above 0"),
        ("{name: box, like: A100, memory_gb: 4}", r"devices\[0\]: unknown field 'memory_gb'|memory_gb: unknown field"),
        ("{name: box}", r"devices\[0\].peak_flops: is missing; it is required"),
        (PLAIN.replace("float32", "float16"), r"devices\[0\].peak_flops: has no float32"),
        ("{like: A100}", r"devices\[0\].name: is missing"),
        ("3", r"devices\[0\]: is 3; give a mapping"),
        (f"{PLAIN}\n- {PLAIN.replace('box', 'B-o x')}", r"devices\[1\].name: 'B-o x' stands twice"),
    ],
)
def test_mistakes_in_a_file_are_one_line(entry: str, message: str, tmp_path: Path, cli: Cli) -> None:
    path = table_of(tmp_path, entry)
    with pytest.raises(InputError, match=message) as told:
        known_devices(path)
    result = cli("devices", "--devices-file", path)
    assert (result.code, result.error_line) == (2, str(told.value))
    assert result.error_line.startswith(str(path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, message in (
        ("kind: ddltool.job\ndevices: [{type: T4}]", "kind: is 'ddltool.job'; expected 'ddltool.devices'"),
        ("device: []", "device: unknown field 'device'"),
        ("kind: ddltool.devices\nschema_version: 2\ndevices: []", "schema_version: is 2"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            known_devices(path)


def test_a_jobs_spec_comes_before_a_file_and_a_file_before_the_table(tmp_path: Path) -> None:
    path = table_of(
        tmp_path, PLAIN, "{name: V100, like: V100, memory_gib: 32, price_per_hour: 3}", "{name: other, like: box}"
    )
    told = with_specs(
        job(
            {},
            max_workers=2,
            devices=[
                {"type": "box", "count": 1, "spec": {"like": "other", "memory_gib": 9}},
                {"type": "v-100", "count": 1, "price_per_hour": 1.0},
                {"type": "T4", "count": 1},
            ],
        ),
        "job.yaml",
        path,
    )
    table = devices_of(told, "job.yaml")
    found = [table.device(offer.type) for offer in told.devices]
    assert [device.memory_gib for device in found] == [9, 32, 16]
    assert found[0].peak_flops == {"float32": 1e12}
    assert [offer.price_per_hour for offer in told.devices] == [None, 1.0, None]
    assert [offer.memory_gib for offer in told.devices] == [9, 32, None]
    assert told.devices[2].spec is None
    assert devices_of(job({"T4": ()}, max_workers=2), "job.yaml").devices == TABLE.devices


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{like: X}", r"job.yaml:devices\[1\].spec.like: unknown device 'X'"),
        ("{memory_gib: -1, like: T4}", r"job.yaml:devices\[1\].spec.memory_gib: is -1; give a number above 0"),
        ("{name: box, like: T4}", r"job.yaml:devices\[1\]: the spec of box has a name"),
        ("[T4]", r"job.yaml:devices\[1\].spec: is a list; give a mapping"),
    ],
)
def test_mistakes_in_a_spec_are_one_line(spec: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: j\nmax_workers: 2\ndevices:\n- {{type: T4, count: 1}}\n- {{type: box, count: 1, spec: {spec}}}\n"
    )
    with pytest.raises(InputError, match=message):
        with_specs(read_job(path), str(path))


def test_commands_take_own_devices(cli: Cli, tmp_path: Path) -> None:
    mine = table_of(tmp_path, "{name: slow, like: V100, peak_flops: {float32: 1.57e11}, memory_bytes_per_s: 9e9}")
    trace = [
        *("trace", "zoo:cifarnet", "--batch-size", "512", "--samples", "2", "--bandwidth", "1000Gbit", "--latency"),
        *("0s", "--json"),
    ]
    times = [cli(*trace, "--device", name, "--devices-file", mine).document["bounds"] for name in ("V100", "slow")]
    assert times[1]["upper_s"] > 20 * times[0]["upper_s"]
    assert "unknown device 'slow'" in cli(*trace, "--device", "slow").error_line

    file = tmp_path / "job.yaml"
    text = "name: j\nmodel: zoo:cifarnet\nmax_workers: 4\nbatch_size: 2\ndevices:\n"
    text += "- {type: V100, count: 1}\n- {type: slow, count: 1}\n"
    file.write_text(text)
    plan = ("plan", file, "--strategy", "est", "--json")
    assert "devices.type: unknown device 'slow'" in cli(*plan).error_line
    by_file = cli(*plan, "--devices-file", mine).document
    spec = "{like: V100, memory_bytes_per_s: 9e9, peak_flops: {float32: 1.57e11}}"
    file.write_text(text.replace("slow, count: 1", f"slow, count: 1, spec: {spec}"))
    by_spec = cli(*plan).document
    assert by_file["throughput"] == by_spec["throughput"]
    assert cli("plan", file, "--strategy", "auto", "--bandwidth", "10Gbit", "--json").code == 0
    file.write_text(text)
    cli("plan", file, "--strategy", "est", "--with", file, "--devices-file", mine, "--json").done()
    base = tmp_path / "plans.db"
    assert cli("companion", file, "-o", base, "--devices-file", mine).code == 0
    assert "--devices-file: is for making" in cli("companion", base, "--devices-file", mine).error_line
    assert "-o: " in cli("plan", file, "--devices-file", mine, "-o", mine).error_line


def test_the_command_lists_and_shows(cli: Cli, tmp_path: Path) -> None:
    listed = cli("devices").done()
    assert max(map(len, listed.out.splitlines())) <= 80
    assert all(f"  {device.name} " in listed.out for device in TABLE.devices)
    shown = cli("devices", "nvidia rtx 3090").out
    for text in (
        *("RTX3090: NVIDIA GeForce RTX 3090", "71.16 x 10^12", "GA102", "31.5 GB/s one way, PCIe 4.0 x16", "24 GiB"),
    ):
        assert text in shown
    assert "price" not in shown
    assert DeviceTable.model_validate(cli("devices", "--json").document) == TABLE
    assert [device["name"] for device in cli("devices", "T4", "--json").document["devices"]] == ["T4"]
    assert (
        "price per hour  2"
        in cli("devices", "box", "--devices-file", table_of(tmp_path, PLAIN.replace("8}", "8, price_per_hour: 2}"))).out
    )
    assert cli("devices", "V1000").error_line.startswith("NAME: unknown device 'V1000'; did you mean \"V100\"")
