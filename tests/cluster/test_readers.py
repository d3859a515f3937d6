"""Traces of real clusters, in hand-made (synthetic) files of their formats: Philly's JSON, Helios's CSV, and bad rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.cluster.generator import POLLUX, size_class
from ddltool.analyzers.cluster.inputs import (
    ClusterTrace,
    busiest,
    read_philly,
    read_table_trace,
    read_workload,
    to_workload,
)
from ddltool.errors import InputError
from tests.conftest import Cli

HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,u1,v1,8,16,1,COMPLETED,2020-06-09 19:00:00,2020-06-09 19:00:10,2020-06-10 07:00:10,43200,10
2,u1,v1,1,4,1,FAILED,2020-06-09 18:00:00,2020-06-09 18:00:00,2020-06-09 18:30:00,1800,0
3,u2,v2,0,4,1,COMPLETED,2020-06-09 18:10:00,2020-06-09 18:10:00,2020-06-09 18:30:00,1200,0
4,u2,v2,2,4,1,CANCELLED,2020-06-09 18:20:00,,,,
5,u2,v2,4,4,1,COMPLETED,2020-06-09 18:40:00,2020-06-09 18:40:00,2020-06-09 19:40:00,3600,0
"""


def machine(gpus: int) -> dict[str, Any]:
    return {"ip": "m1", "gpus": [f"gpu{n}" for n in range(gpus)]}


def philly() -> list[dict[str, Any]]:
    """Return three jobs: two attempts of 2 and 4 GPUs for an hour each; never started; PST and one small attempt."""
    return [
        {
            "status": "Pass",
            "vc": "v1",
            "jobid": "application_1",
            "attempts": [
                {"start_time": "2017-10-07 01:00:00", "end_time": "2017-10-07 02:00:00", "detail": [machine(2)]},
                {
                    "start_time": "2017-10-07 03:00:00",
                    "end_time": "2017-10-07 04:00:00",
                    "detail": [machine(2), machine(2)],
                },
            ],
            "submitted_time": "2017-10-07 00:30:00",
            "user": "u1",
        },
        {
            "status": "Killed",
            "vc": "v1",
            "jobid": "application_2",
            "attempts": [],
            "submitted_time": "2017-10-07 00:40:00",
        },
        {
            "status": "Failed",
            "vc": "v1",
            "jobid": "application_3",
            "attempts": [
                {
                    "start_time": "2017-10-07 00:20:00 PST",
                    "end_time": "2017-10-07 00:50:00 PST",
                    "detail": [machine(1)],
                },
                {"start_time": "2017-10-07 00:55:00", "end_time": "None", "detail": [machine(1)]},
            ],
            "submitted_time": "2017-10-07 00:20:00",
        },
    ]


def helios(text: str = HELIOS) -> ClusterTrace:
    import io

    return read_table_trace(pd.read_csv(io.StringIO(text)), "trace.csv")


def test_helios_by_hand() -> None:
    trace = helios()
    assert trace.submit_s.tolist() == [0.0, 2400.0, 3600.0]
    assert trace.gpus.tolist() == [1.0, 4.0, 8.0]
    assert trace.gpu_hours.tolist() == [0.5, 4.0, 96.0]
    assert trace.skipped == {"no GPU": 1, "never started": 1}
    lines = [line.rsplit(",", 2)[0] for line in HELIOS.splitlines()]
    without = helios("\n".join(lines))  # start and end stand for the duration
    assert without.gpu_hours.tolist() == trace.gpu_hours.tolist()
    tiresias = "job_id,num_gpu,submit_time,duration\n1,4,100,3600\n2,1,40,1800\n"
    assert helios(tiresias).submit_s.tolist() == [0.0, 60.0]


def test_alibabas_tasks_are_jobs() -> None:
    """2020: GPUs in percent, a row for each task; the second job's worker still runs at the end, the third never began."""
    rows = """job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type
a,worker,4,Terminated,100.0,7300.0,600.0,30.0,50.0,T4
a,ps,1,Terminated,90.0,7300.0,600.0,30.0,,CPU
b,worker,2,Running,3700.0,,600.0,30.0,100.0,V100
b,chief,1,Terminated,3700.0,7300.0,600.0,30.0,100.0,V100
c,worker,2,Waiting,,,600.0,30.0,100.0,V100
d,worker,1,Terminated,0.0,10.0,600.0,30.0,,CPU
"""
    trace = helios(rows)
    assert trace.submit_s.tolist() == [0.0, 3610.0]
    assert trace.gpus.tolist() == [2.0, 3.0]
    assert trace.gpu_hours.tolist() == [4.0, 3.0]
    assert (trace.skipped, trace.censored) == ({"no GPU": 1, "never started": 1}, 1)


def test_other_clusters_name_their_columns_otherwise() -> None:
    pods = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
p0,12000,16384,1,500,,LS,Running,0,7200,0
p1,12000,16384,8,1000,,LS,Succeeded,60,7320,120
p2,12000,16384,1,1000,,LS,Pending,60,7320,
"""
    shares = helios(pods)
    assert shares.submit_s.tolist() == [0.0, 60.0]
    assert shares.gpu_hours.tolist() == [1.0, 16.0]
    assert shares.skipped["never started"] == 1
    acme = "job_id,node_num,gpu_num,state,submit_time,start_time,end_time,duration\n"
    acme += "1,1,8,COMPLETED,2023-03-01 00:00:00+08:00,2023-03-01 00:00:00+08:00,2023-03-01 01:00:00+08:00,3600\n"
    acme += "2,1,2,RUNNING,2023-03-01 00:30:00+08:00,2023-03-01 00:30:00+08:00,,\n"
    still = helios(acme)
    assert (still.gpu_hours.tolist(), still.censored) == ([8.0, 1.0], 1)
    assert helios("timestamp,duration,num_gpus\n10,3600,2\n40,7200,1\n").gpu_hours.tolist() == [2.0, 2.0]


def test_philly_by_hand() -> None:
    trace = read_philly(philly(), "philly.json")
    assert trace.submit_s.tolist() == [0.0, 600.0]
    assert trace.gpus.tolist() == [1.0, 4.0]
    assert trace.gpu_hours.tolist() == [0.5, 6.0]
    assert trace.skipped == {"no GPU": 0, "never started": 1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "2020-06-09 18:40:00,2020-06-09 18:40",
            "2020-06-09 25:40:00,2020-06-09 18:40",
            "row 5:submit_time: is 2020-06-09 25",
        ),
        ("5,u2,v2,4", "5,u2,v2,4.5", "row 5:gpu_num: is 4.5; a whole number"),
        ("5,u2,v2,4", "5,u2,v2,-4", "row 5:gpu_num: is -4"),
        ("5,u2,v2,4", "5,u2,v2,x", "row 5:gpu_num: is x; a whole number from 0"),
        ("5,u2,v2,4", "5,u2,v2,1e308", "row 5:gpu_num: is 1e\\+308"),
        ("5,u2,v2,4", "2,u2,v2,4", "row 5:job_id: '2' stands in row 2 too"),
        ("3600,0", "-1,0", "row 5:duration: is -1"),
        ("3600,0", "inf,0", "row 5:duration: is inf"),
        (
            "2020-06-09 18:40:00,2020-06-09 18:40",
            "0001-01-01 00:00:00,2020-06-09 18:40",
            "row 5:submit_time: is 0001-01-01",
        ),
        (
            "2020-06-09 18:40:00,2020-06-09 18:40",
            "9999-01-01 00:00:00,2020-06-09 18:40",
            "row 5:submit_time: is 9999-01-01 00:00:00, 7,984 years from the middle of the trace; times within ten years",
        ),
        (
            "2020-06-09 18:40:00,2020-06-09 18:40",
            "5,2020-06-09 18:40",
            "row 5:submit_time: is 5, and row 1 has 2020-06-09 19:00:00; dates or seconds, the same in all rows",
        ),
        ("gpu_num", "gpu_mun", "trace.csv:gpu_num: column is missing"),
        ("submit_time", "s", "trace.csv:submit_time: column is missing"),
    ],
)
def test_a_bad_row_is_named(old: str, new: str, message: str) -> None:
    assert old in HELIOS
    with pytest.raises(InputError, match=message):
        helios(HELIOS.replace(old, new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda jobs: jobs[0].pop("attempts"), "job 1:attempts: is missing"),
        (lambda jobs: jobs[2].update(submitted_time="yesterday"), "row 3:submitted_time: is yesterday"),
        (
            lambda jobs: jobs[0]["attempts"][1].update(end_time="2017-10-07 02:59:59"),
            "job 1:end_time: of an attempt is '2017",
        ),
        (
            lambda jobs: jobs[0]["attempts"][1].update(end_time="2037-10-07 02:59:59"),
            "job 1:end_time: of an attempt is '2037.*by ten years at most",
        ),
        (lambda jobs: jobs[1].update(submitted_time="60"), "row 2:submitted_time: is 60, and row 1 has 2017"),
        (lambda jobs: jobs[0]["attempts"][1].update(start_time="x"), "job 1:start_time: of an attempt is 'x'"),
        (lambda jobs: jobs[0]["attempts"][1].pop("detail"), "job 1:attempts: are broken"),
        (lambda jobs: jobs[1].update(jobid="application_1"), "row 2:jobid: 'application_1' stands in row 1 too"),
        (lambda jobs: jobs.append(3), "job 4: is no object"),
        (lambda jobs: jobs.__delitem__(slice(0, 2)) or jobs[0]["attempts"].clear(), "no job that ran on a GPU"),
    ],
)
def test_a_bad_job_is_named(change: Callable[[Any], Any], message: str) -> None:
    jobs = philly()
    change(jobs)
    with pytest.raises(InputError, match=message):
        read_philly(jobs, "philly.json")
    with pytest.raises(InputError, match="is no list of jobs"):
        read_philly({}, "philly.json")


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(0.001, 900)), min_size=1, max_size=60), st.integers(1, 12))
def test_the_busiest_span_is_that_of_trying_every_hour_and_classes_are_kept(
    rows: list[tuple[int, float]], hours: int
) -> None:
    submit = np.sort(np.array([row[0] for row in rows], dtype=float))
    submit -= submit[0]
    sizes = np.array([row[1] for row in rows])
    trace = ClusterTrace(submit_s=submit, gpus=np.ones(len(rows)), gpu_hours=sizes, skipped={})
    part = busiest(trace, hours)
    best = max(((submit >= 3600 * h) & (submit < 3600 * (h + hours))).sum() for h in range(60))
    assert len(part.submit_s) == best
    assert ((part.submit_s >= 0) & (part.submit_s < 3600 * hours)).all()
    jobs, counts = to_workload(part, POLLUX, seed=3)
    of = {template.application: template.size for template in POLLUX}
    assert [of[job.application] for job in jobs] == [size_class(each) for each in part.gpu_hours.tolist()]
    assert sum(counts.values()) == best
    sampled, _ = to_workload(part, POLLUX, jobs=1 + best // 2, seed=3)
    assert len(sampled) == 1 + best // 2
    assert {job.submit_s for job in sampled} <= set(part.submit_s.tolist())
    small = [template for template in POLLUX if template.size == "small"]
    assert {of[job.application] for job in to_workload(part, small)[0]} == {"small"}  # the nearest class there is


def test_the_command_reads_samples_and_converts_both_formats(cli: Cli, tmp_path: Path) -> None:
    table, log, made = tmp_path / "helios.csv", tmp_path / "philly.json", tmp_path / "w.csv"
    table.write_text(HELIOS)
    log.write_text(json.dumps(philly()))
    for path, count in ((table, 3), (log, 2)):
        result = cli("simulate", "convert", path, "--pollux", "-o", made).done()
        assert f"{count} of {count} jobs" in result.err
        jobs = read_workload(made)
        assert len(jobs) == count
        assert f"{path.name}; applications drawn by size class" in made.read_text()
    result = cli("simulate", "convert", table, "--jobs", 1, "--hours", 1, "-o", made)
    assert "1 of 3 jobs" in result.err
    assert len(read_workload(made)) == 1
    for arguments, message in [
        ((table, "--jobs", 9), "--jobs: is 9; the trace has 3"),
        ((made,), "is a workload already"),
        ((table, "--pollux", "--traces", tmp_path), "--pollux: has no part beside --traces"),
        ((), "Missing argument 'TRACE'"),
    ]:
        cli("simulate", "convert", *arguments).refuses(message)
    for old, new, message in [
        ("5,u2,v2,4", "5,,u2,v2,4", "helios.csv:row 5: has 13 fields; the header has 12"),
        ("3600,0", "nan,0", "helios.csv:row 5:duration: is nan; a number, or nothing"),
    ]:
        table.write_text(HELIOS.replace(old, new))
        cli("simulate", "convert", table).refuses(message)
    log.write_text(json.dumps(philly())[:-40])
    cli("simulate", "convert", log).refuses("philly.json:line 1 column 840: is not valid JSON")


def test_phillys_log_is_told_by_how_it_begins_and_a_job_without_an_end_is_counted(cli: Cli, tmp_path: Path) -> None:
    jobs = philly()
    jobs[2]["attempts"][0]["end_time"] = "None"
    log = tmp_path / "cluster_job_log"  # as it is released
    log.write_text(json.dumps(jobs, indent=1))
    made = cli("simulate", "convert", log, "-o", tmp_path / "w.csv").done()
    assert "2 of 2 jobs" in made.err
    assert "left out: 1 never started; 1 still ran at the log's end and count until then" in made.err
    lines = HELIOS.replace(",43200,10", ",,10").replace("2020-06-10 07:00:10", "")
    found = helios(lines)
    assert found.skipped == {"no GPU": 1, "never started": 1}
    assert found.censored == 1


@pytest.mark.parametrize("header", ["when,duration,devices", "name,cpu_milli,memory_mib,gpu,created"])
def test_a_table_that_is_neither_trace_nor_workload_is_told_what_both_have(
    cli: Cli, tmp_path: Path, header: str
) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"{header}\n{','.join('1' for _ in header.split(','))}\n")
    refused = cli("simulate", "convert", table, "-o", tmp_path / "w.csv")
    assert refused.code == 2
    assert (
        "a workload has name, time, application, num_replicas, batch_size; a cluster's trace has" in refused.error_line
    )
    assert (
        "submit_time or submitted_time or submit or creation_time or timestamp; gpu_num or num_gpus"
        in refused.error_line
    )
    assert (
        "duration or run_time or runtime (seconds), or start_time or scheduled_time and end_time" in refused.error_line
    )


def test_reading_grows_with_the_rows_and_not_faster() -> None:
    def spent(rows: int) -> float:
        chance = np.random.default_rng(0)
        when = pd.Timestamp("2020-06-01") + pd.to_timedelta(chance.integers(0, 10**7, rows), unit="s")
        frame = pd.DataFrame(
            {
                "job_id": np.arange(rows),
                "gpu_num": chance.integers(0, 9, rows),
                "submit_time": when.strftime("%Y-%m-%d %H:%M:%S"),
                "duration": chance.integers(0, 10**5, rows),
            }
        )
        begin = time.process_time()
        to_workload(read_table_trace(frame, "trace.csv"), POLLUX)
        return time.process_time() - begin

    spent(2_000)
    assert spent(80_000) < 10 * 4 * max(spent(20_000), 0.01)
