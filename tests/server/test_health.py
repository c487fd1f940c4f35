"""What the probes say while a step hangs: not ready at once, not alive when it has hung for much longer."""

from pathlib import Path

from doubles_engine import until
from doubles_http import CUE, in_loop, live_server, raw_post


@in_loop
async def test_probes_follow_a_step_that_hangs(tmp_path: Path) -> None:
    settings = {"step_timeout_s": 0.5, "trace_file": str(tmp_path / "trace")}
    async with live_server(engine=settings) as live:
        body = {"prompt": [5, *CUE], "stream": True, "max_tokens": 8000}
        live.runner.stall_from(10)
        async with raw_post(live, "/v1/completions", body):
            for path in ("/health", "/ready"):
                assert (await live.http.get(path)).status_code == 200
            await until(lambda: live.engine.is_stalled)
            assert (await live.http.get("/health")).status_code == 200
            for refused in (await live.http.get("/ready"), await live.complete()):
                assert refused.status_code == 503
                assert refused.json()["error"]["message"].startswith("a step has not completed for ")
                assert int(refused.headers["retry-after"]) >= 1
            await until(lambda: live.engine.step_wait_s > 1)
            answer = await live.http.get("/health")
            assert (answer.status_code, answer.json()) == (503, {"status": "stuck"})
        await until(lambda: live.engine.stats().num_open == 0)
