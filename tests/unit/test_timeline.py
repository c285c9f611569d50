"""The page and the Chrome trace of recordings that were made up."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from smp.observe.timeline.chrome import to_chrome
from smp.observe.timeline.document import Document, build
from smp.observe.timeline.events import Event, RankRecording
from smp.observe.timeline.gather import estimate
from smp.observe.timeline.page import to_page
from smp.observe.timeline.plan import chain, make_plan
from tests.patience import PATIENCE_S

MS = 1_000_000
FORWARD, BACKWARD = 0, 1
NAMES = ("", "embed", "layers.0", "head</script><b>")


def event(kind: str, begin: float, end: float, **fields: Any) -> Event:
    defaults: dict[str, Any] = dict(
        step=4, phase=FORWARD, mb=0, module_id=-1, visit=0, resume=0, what="", peer=-1
    )
    defaults |= dict(ref_rank=-1, ref_id=-1, num_bytes=0) | fields
    return Event(kind=kind, begin_ns=int(begin * MS), end_ns=int(end * MS), **defaults)


def run(begin: float, end: float, mb: int, phase: int = FORWARD, **fields: Any) -> Event:
    return event("run", begin, end, mb=mb, phase=phase, **fields)


def tensor(kind: str, time: float, peer: int, mb: int, ref: int) -> Event:
    fields = dict(mb=mb, peer=peer, ref_rank=0, ref_id=ref, num_bytes=4096, what="data")
    return event(kind, time, time, **fields)


def recording(rank: int, events: list[Event], **fields: Any) -> RankRecording:
    defaults: dict[str, Any] = dict(
        rank=rank,
        pp_rank=rank,
        replica=(0, 1),
        place=f"pp {rank}",
        machine="one",
        module_names=NAMES,
        policy="interleaved",
        active_microbatches=None,
        events=tuple(events),
    )
    return RankRecording(**(defaults | fields))


def two_ranks() -> list[RankRecording]:
    """Two microbatches over two ranks: the driver runs 4 of 10 ms, the other one 6."""
    driver = [
        run(0, 1, 0),
        run(1, 2, 1),
        tensor("sent", 1, 1, 0, 7),
        tensor("sent", 2, 1, 1, 8),
        event("wait", 1, 5, what="the data of a result", peer=1, phase=BACKWARD, resume=1),
        event("idle", 2, 5, what="the data of a result", peer=1, phase=BACKWARD, resume=1),
        run(5, 6, 0, BACKWARD, resume=1),
        run(9, 10, 1, BACKWARD, resume=1),
        event("step", 0, 11, ref_id=2),
    ]
    other = [
        tensor("received", 1.5, 0, 0, 7),
        tensor("received", 2.5, 0, 1, 8),
        run(2, 3, 0, module_id=2),
        run(3, 5, 0, BACKWARD, module_id=2),
        run(5, 6, 1, module_id=3),
        run(6, 8, 1, BACKWARD, module_id=3),
        event("step", 0.5, 11, ref_id=2),
    ]
    return [recording(1, other), recording(0, driver)]


def with_devices() -> list[RankRecording]:
    """The same on devices: the hosts only ask, and the first lane carries two tensors at once."""
    other, driver = two_ranks()
    asked = [
        e._replace(kind="device", uncertainty_ns=7_000) if e.kind == "run" else e
        for e in driver.events
    ]
    hosts = [run(0.1 * i, 0.1 * i + 0.05, i % 2) for i in range(4)]
    lane = dict(mb=-1, peer=1, what="fake lane")
    copies = [
        event("lane sent", 1, 3, num_bytes=1000, **lane),
        event("lane sent", 2, 4, num_bytes=2000, **lane),
        event("lane sent", 3, 5, num_bytes=3000, **lane),
        event("lane received", 6, 7, num_bytes=4000, **lane),
    ]
    return [other, recording(0, [*asked, *hosts, *copies])]


@pytest.fixture
def document() -> Document:
    return build(two_ranks())


# ---- the document ----------------------------------------------------------


def test_ranks_and_steps_are_in_order_and_bubbles_follow_from_the_boxes(document: Document) -> None:
    assert [r.rank for r in document.ranks] == [0, 1]
    (step,) = document.steps
    assert (step.number, step.num_microbatches, step.makespan_ns) == (4, 2, 10 * MS)
    assert step.bubble(0) == pytest.approx(0.6) and step.bubble(1) == pytest.approx(0.4)
    assert document.bubble(0) == pytest.approx(0.6)
    assert step.plan.note == "" and step.plan.actions


def test_tensors_are_paired_by_name_and_the_rest_is_counted() -> None:
    ranks = two_ranks()
    stray = tensor("sent", 3, 1, 1, 9)
    ranks[1] = recording(0, [*ranks[1].events, stray])
    document = build(ranks)
    pairs = [(t.source, t.target, t.mb, t.received_ns - t.sent_ns) for t in document.transfers]
    assert pairs == [(0, 1, 0, MS // 2), (0, 1, 1, MS // 2)]
    assert document.num_unpaired == 1
    assert any("1 tensors have no arrow" in note for note in document.notes)


def test_two_tensors_of_one_name_are_paired_in_their_order() -> None:
    ranks = two_ranks()
    driver = [*ranks[1].events, tensor("sent", 6, 1, 1, 8)]
    other = [*ranks[0].events, tensor("received", 6.25, 0, 1, 8)]
    transfers = build([recording(0, driver), recording(1, other)]).transfers
    assert [(t.received_ns - t.sent_ns) / MS for t in transfers] == [0.5, 0.5, 0.25]


def test_tensors_of_steps_before_the_trace_do_not_count() -> None:
    ranks = two_ranks()
    late = tensor("received", 0.1, 0, 1, 5)._replace(step=3)
    ranks[0] = recording(1, [late, *ranks[0].events])
    document = build(ranks)
    assert document.num_unpaired == 0 and len(document.transfers) == 2


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step was recorded"):
        build([recording(0, [run(0, 1, 0)], replica=(0,))])


def test_dropped_events_and_unequal_clocks_are_told() -> None:
    ranks = two_ranks()
    ranks[0] = recording(1, list(ranks[0].events), num_dropped=3, uncertainty_ns=40_000)
    notes = build(ranks).notes
    assert any("rank 1: 3 older events were dropped" in note for note in notes)
    assert any("within 40 µs" in note for note in notes)


def test_the_quickest_answer_tells_the_clock() -> None:
    # The other clock is 1,000 ahead; the second round is the quick one.
    offset, uncertainty = estimate([(0, 1_090, 100), (200, 1_205, 210), (300, 1_301, 340)])
    assert (offset, uncertainty) == (1_000, 5)


def test_aligned_events_are_on_the_clock_of_rank_0() -> None:
    rank = recording(1, [run(5, 6, 0)]).aligned(2 * MS, 10)
    assert (rank.events[0].begin_ns, rank.events[0].end_ns) == (3 * MS, 4 * MS)


def test_task_texts_are_those_of_the_executed_order() -> None:
    assert run(0, 1, 3).task == "F3"
    assert run(0, 1, 3, BACKWARD, module_id=17, visit=1, resume=2).task == "B3:m17.1/2"


# ---- the plan --------------------------------------------------------------


def test_the_driver_is_the_last_stage_too_with_what_it_does_after_the_others() -> None:
    driver = [
        run(0, 1, 0),
        run(4, 6, 0, resume=1),
        run(6, 9, 0, BACKWARD),
        run(13, 14, 0, BACKWARD),
    ]
    other = [run(1, 4, 0, module_id=2), run(9, 13, 0, BACKWARD, module_id=2)]
    stages = chain({0: driver, 1: other}, 1)
    assert stages == [(0, 1 * MS, 1 * MS), (1, 3 * MS, 4 * MS), (0, 2 * MS, 3 * MS)]


def test_a_plan_of_equal_stages_is_one_forward_one_backward() -> None:
    runs: dict[int, list[Event]] = {0: [], 1: []}
    for mb in range(4):
        for rank in (0, 1):
            module = -1 if rank == 0 else 2
            runs[rank] += [run(10 * mb + rank, 10 * mb + rank + 1, mb, module_id=module)]
            begin = 10 * mb + 4 - rank
            runs[rank] += [run(begin, begin + 1, mb, BACKWARD, module_id=module)]
    plan = make_plan(runs, {}, 4, "interleaved", None)
    # m microbatches of 2 ms over p ranks: (m + p - 1) * 2 ms.
    assert plan.makespan_ns == pytest.approx(10 * MS)
    assert plan.bubble == {0: pytest.approx(0.2), 1: pytest.approx(0.2)}
    assert len(plan.actions) == 16


def test_an_impossible_plan_says_why() -> None:
    plan = make_plan({0: [run(0, 1, 0)]}, {}, 1, "no such policy", None)
    assert plan.bubble is None and "no such policy" in plan.note


# ---- the Chrome trace ------------------------------------------------------


def test_chrome_trace_has_each_task_once_and_paired_flows(document: Document) -> None:
    trace = json.loads(json.dumps(to_chrome(document)))
    events = trace["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert Counter((e["pid"], e["args"]["task"], e["ts"], e["dur"]) for e in boxes) == Counter(
        (r.rank, e.task, e.begin_ns / 1e3, e.duration_ns / 1e3)
        for r in document.ranks
        for e in r.of_kind("run")
    )
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 2
    for number, start in starts.items():
        assert (start["pid"], ends[number]["pid"]) == (0, 1)
        assert ends[number]["ts"] >= start["ts"] and ends[number]["bp"] == "e"
        for flow in (start, ends[number]):  # on a box, or viewers drop it
            assert any(
                e["ph"] == "X"
                and (e["pid"], e["tid"]) == (flow["pid"], flow["tid"])
                and e["ts"] <= flow["ts"] <= e["ts"] + e["dur"]
                for e in events
            )
    waits = Counter(e["ph"] for e in events if e.get("cat") == "wait")
    assert waits == {"b": 1, "e": 1}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 (pp 0)", "rank 1 (pp 1)"]
    assert all({"ph", "pid", "name"} <= e.keys() for e in events)
    assert all("ts" in e for e in events if e["ph"] != "M")


def test_chrome_trace_has_rows_of_devices_and_lanes() -> None:
    events = json.loads(json.dumps(to_chrome(build(with_devices()))))["traceEvents"]
    threads = {
        (e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"
    }
    assert len({(pid, tid) for (pid, _), tid in threads.items()}) == len(threads)
    assert not any(pid == 1 and ("lane" in n or n == "device") for pid, n in threads)

    def boxes(name: str) -> list[tuple[float, float, Any]]:
        tid = threads[0, name]
        found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, tid)]
        return [(e["ts"], e["dur"], e["args"].get("bytes", e["args"].get("task"))) for e in found]

    assert boxes("device") == [
        (0, 1000, "F0"),
        (1000, 1000, "F1"),
        (5000, 1000, "B0/1"),
        (9000, 1000, "B1/1"),
    ]
    assert len(boxes("executed")) == 4, "the row of the host stays"
    # Boxes of one row must not overlap.
    assert boxes("lane to rank 1") == [(1000, 2000, 1000), (3000, 2000, 3000)]
    assert boxes("lane to rank 1 (2)") == [(2000, 2000, 2000)]
    assert boxes("lane from rank 1") == [(6000, 1000, 4000)]
    lanes = [e for e in events if e.get("cat") == "lane"]
    assert {e["name"] for e in lanes} >= {"1000 bytes, fake lane"}
    assert [(e["args"]["source"], e["args"]["target"]) for e in lanes].count((0, 1)) == 3


def test_bubbles_and_plan_are_those_of_the_device(document: Document) -> None:
    on_device = build(with_devices())
    (step,), (plain,) = on_device.steps, document.steps
    assert step.busy_ns == plain.busy_ns and step.bubble(0) == plain.bubble(0) > 0
    assert step.plan == plain.plan
    assert any(
        "devices agree with the clock of their host within 7 µs" in n for n in on_device.notes
    )
    assert not any("devices" in n for n in document.notes)


def test_chrome_trace_has_the_figures_of_each_step(document: Document) -> None:
    (found,), (step,) = to_chrome(document)["otherData"]["steps"], document.steps
    assert (found["number"], found["microbatches"], found["makespan_us"]) == (4, 2, 10_000)
    assert (found["begin_us"], found["end_us"]) == (0, 11_000)
    for rank in (0, 1):
        own = found["ranks"][str(rank)]
        assert own["busy_us"] == step.busy_ns[rank] / 1e3
        assert own["bubble"] == pytest.approx(step.bubble(rank))
        assert own["planned_bubble"] == step.planned_bubble(rank)
    assert found["planned_us"] == step.plan.makespan_ns / 1e3


# ---- the page --------------------------------------------------------------


def scripts(page: str) -> tuple[str, str]:
    """(data, program)"""
    data, program = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    return data, program


def page_of(document: Document) -> str:
    return to_page(to_chrome(document))


def answer_of_page(document: Document, tmp_path: Path, code: str) -> Any:
    """The JSON that code behind the program of the page prints; `trace` is what it has read."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    text, program = scripts(page_of(document))
    file = tmp_path / "page.js"
    file.write_text(f"{program}\nconst trace = readTrace({text});\n{code}", encoding="utf-8")
    done = subprocess.run([node, file], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_page_is_complete_and_refers_to_nothing_outside(document: Document) -> None:
    page = page_of(document)
    assert page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")
    assert not re.search(r"https?:|//[a-z]|<link|<img|<iframe|@import|url\(|\ssrc=|\shref=", page)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", page)
    assert not re.search(r"/\*(STYLE|DATA|SCRIPT)\*/", page)
    for tag in ("html", "head", "body", "style", "header", "main", "section", "table"):
        assert page.count(f"<{tag}>") + page.count(f"<{tag} ") == page.count(f"</{tag}>"), tag


def test_page_has_the_trace_and_cannot_be_left_by_a_module_name(document: Document) -> None:
    text, _ = scripts(page_of(document))
    assert "<" not in text and NAMES[3] in json.dumps(json.loads(text))
    assert json.loads(text) == json.loads(json.dumps(to_chrome(document)))


def test_program_of_the_page_finds_every_element(document: Document) -> None:
    page = page_of(document)
    _, program = scripts(page)
    wanted = set(re.findall(r'getElementById\("([^"]+)"\)', program))
    assert wanted and wanted == set(re.findall(r'\sid="([^"]+)"', page))


def test_program_of_the_page_has_its_brackets(document: Document) -> None:
    """Counts the brackets of the page's program, which needs no Node.js."""
    _, program = scripts(page_of(document))
    bare = re.sub(r'//[^\n]*|"(\\.|[^"\\])*"', "", program)
    assert [bare.count(c) for c in "({["] == [bare.count(c) for c in ")}]"]


def test_page_reads_rows_of_ranks_devices_and_lanes(document: Document, tmp_path: Path) -> None:
    code = """
    console.log(JSON.stringify(trace.ranks.map((rank) => rank.rows.map(
      (row) => [row.kind, row.name, row.boxes.map((b) => [b.begin, b.end, b.name])]))));
    """
    plain, on_device = (
        answer_of_page(one, tmp_path, code) for one in (document, build(with_devices()))
    )
    assert [kind for kind, _, _ in plain[0]] == ["planned", "executed", "idle", "wait"]
    rows = {name: boxes for _, name, boxes in plain[0]}
    assert [(b, e) for b, e, _ in rows["executed"]] == [
        (0, 1000), (1000, 2000), (5000, 6000), (9000, 10000)
    ]  # fmt: skip
    assert rows["idle"] == [[2000, 5000, "the data of a result of rank 1"]]
    assert rows["waits"] == [
        [1000, 5000, "B0 step function waits for the data of a result of rank 1"]
    ]
    names = [name for _, name, _ in on_device[0]]
    assert names[:3] == ["planned", "executed", "device"]
    assert [n for n in names if n.startswith("lane")] == [
        "lane to rank 1", "lane to rank 1 (2)", "lane from rank 1"
    ]  # fmt: skip


def test_figures_of_the_page_are_those_of_the_document(document: Document, tmp_path: Path) -> None:
    result = answer_of_page(
        document,
        tmp_path,
        """
        const height = place(trace.ranks);
        const boxes = (list) => list.map(([begin, end]) => ({begin, end}));
        console.log(JSON.stringify({
          figures: trace.ranks.map((rank) => figures(trace, rank, 4)),
          whole: trace.ranks.map((rank) => figures(trace, rank, null)),
          tops: trace.ranks.map((r) => r.y), bottoms: trace.ranks.map((r) => r.bottom), height,
          spread: spread(boxes([[0, 4], [1, 3], [3, 5], [5, 6]]), 2),
          after: [0, 1.5, 4, 9].map((t) => firstAfter(boxes([[0, 1], [1, 3], [4, 5]]), t)),
          ticks: ticks(0, 1000, 900), words: [timeText(1500), bytesText(4096), shareText(0.5)],
        }));
        """,
    )
    (step,) = document.steps
    assert result["whole"] == result["figures"]
    for rank, figures in enumerate(result["figures"]):
        assert figures["bubble"] == pytest.approx(step.bubble(rank))
        assert figures["planned"] == pytest.approx(step.planned_bubble(rank), abs=1e-4)
        assert figures["busy"] == step.busy_ns[rank] / 1e3
    assert [f["sent"] for f in result["figures"]] == [8192, 0]
    assert result["figures"][0]["reasons"] == [["the data of a result of rank 1", 3000]]
    assert result["tops"][1] > result["bottoms"][0] and result["height"] > result["bottoms"][1]
    assert [[(b["begin"], b["end"]) for b in row] for row in result["spread"]] == [
        [(0, 4), (5, 6)],
        [(1, 3), (3, 5)],
    ]
    assert result["after"] == [0, 1, 2, 3]
    assert len(result["ticks"]) == 11
    assert result["words"] == ["1.500 ms", "4.1 kB", "50.0 %"]


def test_page_draws_and_says_what_is_under_the_pointer(document: Document, tmp_path: Path) -> None:
    """Runs the page in a made-up browser, which keeps drawings and the listeners of elements."""
    result = answer_of_page(
        document,
        tmp_path,
        """
        const drawn = [];
        const pen = new Proxy({}, {
          get: (own, name) => own[name] || ((...args) => drawn.push([name, ...args])),
        });
        const element = (id) => ({
          id, listeners: {}, style: {}, hidden: true, checked: true, value: "4", clientWidth: 1000,
          scrollTop: 0, offsetWidth: 50, getContext: () => pen, add() {}, append() {},
          replaceChildren(...rows) { this.rows = rows.length; },
          addEventListener(name, call) { this.listeners[name] = call; },
        });
        const elements = {};
        globalThis.document = {
          documentElement: {},
          createElement: element,
          getElementById: (id) => elements[id] = elements[id] || element(id),
        };
        document.getElementById("canvas").parentElement = element("main");
        globalThis.window = {innerHeight: 800, innerWidth: 1200, addEventListener() {}};
        globalThis.matchMedia = () => element("media");
        globalThis.getComputedStyle = () => ({getPropertyValue: (name) => name});
        globalThis.Option = class {};
        showWords(trace);
        show(trace);
        const texts = drawn.filter((call) => call[0] === "fillText").map((call) => call[1]);
        const row = trace.ranks[0].rows.find((one) => one.kind === "executed");
        const move = elements.canvas.listeners.pointermove;
        move({buttons: 0, offsetX: GUTTER + 2, offsetY: row.y + 2, clientX: 0, clientY: 0});
        const tip = elements.tip.textContent;
        move({buttons: 0, offsetX: 2, offsetY: 2, clientX: 0, clientY: 0});
        console.log(JSON.stringify({
          texts, tip, hidden: elements.tip.hidden, rows: elements.figures.rows,
          lines: drawn.filter((call) => call[0] === "lineTo").length,
          summary: elements.summary.textContent,
        }));
        """,
    )
    assert {"rank 0 (pp 0)", "bubble 60.0 %", "F0 step f…"} <= set(result["texts"])
    assert result["tip"].startswith("F0 step function\n1.000 ms\n") and result["hidden"]
    assert result["rows"] == 3, "a head and two ranks"
    assert result["lines"] == 2 + 2, "two arrows, begin and end of the step"
    assert "2 microbatches · schedule interleaved" in result["summary"]
