"""The toy graphs of TicTac's figures, with the orders that the paper gives for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddltool.graph import Graph, Op


def _recv(name: str, duration_s: float = 1.0) -> Op:
    return Op(name=name, kind="recv", resource="channel:0", duration_s=duration_s, size_bytes=1.0, parameter=name)


def _compute(name: str, *inputs: str, duration_s: float = 1.0) -> Op:
    return Op(name=name, kind="compute", duration_s=duration_s, inputs=inputs, op_type="toy")


def figure1() -> Graph:
    """Return Figure 1 (a): op1 needs recv1; op2 needs op1 and recv2. recv1 first overlaps op1 with recv2.

    Both recvs have the same M+ (op2 waits for both), so TIC leaves them equal; P tells TAC to start with recv1.
    """
    ops = (_recv("recv1"), _recv("recv2"), _compute("op1", "recv1"), _compute("op2", "op1", "recv2"))
    return Graph.from_ops("figure1", "inference", ops)


def figure4a(m_a: float = 1.0, p_a: float = 2.0, m_b: float = 2.0, p_b: float = 1.0) -> Graph:
    """Return Figure 4 (a), case 1: recvs A and B, each with compute of its own; times in seconds.

    Johnson's rule orders them; with the default times A goes first (a step of 4 s instead of 5 s).
    """
    ops = (
        _recv("recvA", m_a),
        _recv("recvB", m_b),
        _compute("opA", "recvA", duration_s=p_a),
        _compute("opB", "recvB", duration_s=p_b),
    )
    return Graph.from_ops("figure4a", "inference", ops)


def figure4b() -> Graph:
    """Return Figure 4 (b), case 2: op1 needs recvs A and B, op2 also C, op3 also D.

    No recv frees any compute alone (P = 0), so M+ decides: A and B before C before D.
    """
    ops = (
        *(_recv(f"recv{letter}") for letter in "ABCD"),
        _compute("op1", "recvA", "recvB"),
        _compute("op2", "op1", "recvC"),
        _compute("op3", "op2", "recvD"),
    )
    return Graph.from_ops("figure4b", "inference", ops)


TOYS: Mapping[str, Callable[[], Graph]] = {"figure1": figure1, "figure4a": figure4a, "figure4b": figure4b}
