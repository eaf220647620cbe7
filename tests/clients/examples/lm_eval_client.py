"""lm-evaluation-harness: a task of its own, by the command line, and what it says where the service has no answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BASE, MODEL = sys.argv[1:]
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 64, temperature: 0.7, do_sample: true}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    {"question": "What is the capital of France?", "answer": "The capital of France is Paris."},
    {"question": "What is the capital of the other country?", "answer": "Nobody knows."},
]


def run(kind: str, model: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    arguments = ",".join(f"{name}={value}" for name, value in {"model": model, **settings}.items())
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments]
    command += ["--tasks", "capitals", "--include_path", ".", "--apply_chat_template", "--output_path", kind]
    return subprocess.run([*command, "--log_samples"], capture_output=True, text=True, timeout=130)


Path("capitals.yaml").write_text(TASK)
Path("capitals.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
found: dict[str, Any] = {}
chat = f"{BASE}/chat/completions"
ended = run("local-chat-completions", MODEL, base_url=chat, num_concurrent=2, max_retries=1)
if ended.returncode:
    raise SystemExit(ended.stderr[-3000:])
[path] = Path("local-chat-completions").glob("**/results_*.json")
found["accuracy"] = json.loads(path.read_text())["results"]["capitals"]["exact_match,none"]
[path] = Path("local-chat-completions").glob("**/samples_*.jsonl")
samples = [json.loads(line) for line in path.read_text().splitlines()]
found["answers"] = [sample["resps"][0][0] for sample in samples]
refused = run("local-chat-completions", "nobody", base_url=chat, max_retries=1)
found["error"] = refused.returncode != 0 and "nobody" in refused.stderr + refused.stdout
print(json.dumps(found))
