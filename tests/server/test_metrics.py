"""The exposition text: the seed's names, legal lines, escaped labels."""

import re

from ocgpu.server.arbiter import Counts, State
from ocgpu.server.metrics import Metrics, family
from ocgpu.server.registry_view import peer_series

IDLE = Counts(State.IDLE, llm_inflight=0, image_pending=False, waiting_llm=0, waiting_image=0)
LINE = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+')


def test_the_seeds_series_are_there_by_name() -> None:
    text = Metrics().render(IDLE._replace(state=State.LLM, llm_inflight=3, waiting_llm=2))

    assert 'gpulock_state{state="idle"} 0\n' in text
    assert 'gpulock_state{state="llm"} 1\n' in text
    assert 'gpulock_state{state="image"} 0\n' in text
    assert "gpulock_llm_inflight 3\n" in text
    assert 'gpulock_image_jobs_total{result="done"} 0\n' in text
    assert "# TYPE gpulock_lock_wait_seconds histogram\n" in text
    assert "# TYPE gpulock_unload_seconds histogram\n" in text
    assert 'gpulock_waiting{kind="llm"} 2\n' in text


def test_every_line_is_a_comment_or_a_sample() -> None:
    text = Metrics().render(IDLE)

    for line in text.splitlines():
        assert line.startswith("# ") or LINE.fullmatch(line), line


def test_buckets_are_cumulative_and_end_with_all() -> None:
    metrics = Metrics()
    for seconds in (0.05, 0.1, 0.3, 1000.0):
        metrics.unload.observe(seconds)

    text = metrics.render(IDLE)

    assert 'gpulock_unload_seconds_bucket{le="0.1"} 2\n' in text
    assert 'gpulock_unload_seconds_bucket{le="0.5"} 3\n' in text
    assert 'gpulock_unload_seconds_bucket{le="60"} 3\n' in text
    assert 'gpulock_unload_seconds_bucket{le="+Inf"} 4\n' in text
    assert "gpulock_unload_seconds_count 4\n" in text
    assert "gpulock_unload_seconds_sum 1000.45\n" in text


def test_label_values_are_escaped() -> None:
    text = family("x", "gauge", "x", [("", {"name": 'a"b\\c\nd'}, 1)])

    assert text.splitlines()[-1] == 'x{name="a\\"b\\\\c\\nd"} 1'


def test_peers_are_ratios_and_seconds() -> None:
    peer = {"pid": 7, "name": "b", "weight": 2.0, "share_pct": 50.0, "busy_pct": 25.0}
    document = {
        "self": {**peer, "pid": 6, "name": "a", "active": False},
        "peers": [{**peer, "active": True, "heartbeat_age_ms": 250}],
    }

    text = peer_series(document)

    assert "gpushare_peers 2\n" in text
    assert 'gpushare_peer_share_ratio{pid="7",name="b"} 0.5\n' in text
    assert 'gpushare_peer_heartbeat_age_seconds{pid="7",name="b"} 0.25\n' in text
    assert 'gpushare_peer_active{pid="6",name="a"} 0\n' in text
