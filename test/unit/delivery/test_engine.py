"""Engine.generate offline, without HTTP and here without a tokenizer: the same fields and types."""

import json
import subprocess
import sys
import textwrap

SCRIPT = """
import asyncio, json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", attention_backend="torch_native", dtype="float32",
        max_total_tokens=4096, max_running_requests=8, skip_tokenizer_init=True,
        enable_return_routed_experts=True, grammar_backend="none", log_level="error",
    )
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    prompts = [list(range(40, 40 + n)) for n in (1, 20, 33)]
    ask = dict(sampling_params=sampling, return_routed_experts=True)
    found = {
        "single": engine.generate(input_ids=prompts[1], **ask),
        "batch": engine.generate(
            input_ids=prompts, sampling_params=sampling, return_routed_experts=[True, False, True],
            routed_experts_start_len=[0, 0, 30], routed_experts_dtype=["auto", "int32", "int32"],
        ),
        "stream": list(engine.generate(input_ids=prompts[1], stream=True, **ask)),
        "async": engine.loop.run_until_complete(engine.async_generate(input_ids=prompts[1], **ask)),
        "silent": engine.generate(input_ids=prompts[1], sampling_params=sampling),
    }
    try:
        engine.generate(input_ids=prompts[1], routed_experts_start_len=-1, **ask)
    except ValueError as error:
        found["error"] = str(error)
    found["after"] = engine.generate(input_ids=prompts[1], **ask)
    with open(sys.argv[2], "w") as file:
        json.dump({"prompts": prompts, **found}, file)
    engine.shutdown()
"""


def rows_of(result):
    from sglang.srt.layers.moe.routed_experts_capturer import (
        decode_routed_experts,
        extract_routed_experts_from_meta_info,
    )

    rows = decode_routed_experts(result["meta_info"])
    assert (rows.reshape(-1) == extract_routed_experts_from_meta_info(result)).all()
    return rows


def test_engine_without_tokenizer(model, reference, tmp_path):
    script, output = tmp_path / "offline.py", tmp_path / "found.json"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-W", "ignore", str(script), str(model), str(output)]
    subprocess.run(command, check=True, timeout=600)
    found = json.loads(output.read_text())
    prompts = found["prompts"]

    def check(prompt, result):
        start = result["meta_info"]["routed_experts_start_len"]
        reference.check(prompt + result["output_ids"], rows_of(result), start)

    for name in ("single", "async", "after"):
        check(prompts[1], found[name])
    check(prompts[0], found["batch"][0])
    check(prompts[2], found["batch"][2])
    for silent in (found["silent"], found["batch"][1], *found["stream"][:-1]):
        assert not any(name.startswith("routed_experts") for name in silent["meta_info"])
    last = found["stream"][-1]["meta_info"]
    assert last["routed_experts"] == found["single"]["meta_info"]["routed_experts"]
    assert isinstance(last["routed_experts"], str)
    assert "routed_experts_start_len" in found["error"]
