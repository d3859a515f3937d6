"""What the tests of replays share."""

from __future__ import annotations

import pytest

from ddltool.analyzers.cluster.cluster import ClusterSpec
from ddltool.analyzers.cluster.job import JobSpec
from ddltool.analyzers.cluster.truth import Application
from tests.helpers.workloads import shipped


@pytest.fixture(scope="module")
def synthetic() -> tuple[list[JobSpec], dict[str, Application], ClusterSpec]:
    return shipped()
