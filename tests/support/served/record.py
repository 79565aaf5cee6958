"""`python -m tests.support.served.record URL DIRECTORY > recorded.json` records the answers of
vLLM.

DIRECTORY has the weights to load. A test checks that the stand-in answers in this form.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

GENERATE = "/inference/v1/generate"
PARAMS = {
    **{"n": 2, "max_tokens": 3, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "logprobs": 0},
    **{"stop_token_ids": [1], "skip_special_tokens": False, "detokenize": False},
}
KEPT = {
    "model_config": ("dtype", "logprobs_mode", "max_logprobs"),
    "lora_config": ("max_lora_rank",),
}


def exchange(url: str, target: str, body: object) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + target, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, kind, text = answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        status, kind, text = error.code, error.headers["content-type"], error.read()
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text.decode()
    if target.startswith("/server_info"):
        config = answer["vllm_config"]
        answer = {"vllm_config": {k: {key: config[k][key] for key in v} for k, v in KEPT.items()}}
    return {"target": target, "request": body, "status": status, "type": kind, "answer": answer}


def main(url: str, directory: str) -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
    missing = {"method": "reload_weights", "kwargs": {"weights_path": directory + "/missing"}}
    prompt = {"max_tokens": 1, "logprobs": 2, "logprob_token_ids": [9, 8], "detokenize": False}
    asked = [
        ("/v1/models", None),
        ("/version", None),
        ("/health", None),
        ("/server_info?config_format=json", None),
        ("/pause?mode=keep", {}),
        ("/collective_rpc", reload),
        ("/update_weight_version", {"new_version": "0a1b2c3d.1"}),
        ("/resume", {}),
        (GENERATE, {"token_ids": [5, 6, 7], "cache_salt": "1", "sampling_params": PARAMS}),
        (GENERATE, {"token_ids": [5, 6, 7], "sampling_params": prompt}),
        (GENERATE, {"model": "other", "token_ids": [5], "sampling_params": prompt}),
        (GENERATE, {"token_ids": [5] * 300, "sampling_params": prompt}),
        ("/collective_rpc", missing),
    ]
    made = [exchange(url, target, body) for target, body in asked]
    print(json.dumps(made, indent=1).replace(directory, "DIRECTORY"))


if __name__ == "__main__":
    main(*sys.argv[1:])
