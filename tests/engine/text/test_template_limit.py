"""A chat template that does not end for certain messages is stopped, by both of its renderers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine.protocol.types import InvalidRequest
from engine.remote.local_tokenizer import LocalTokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.conftest import Checkpoints
from tests.engine.models.test_models import copy_checkpoint
from tests.long import mostly_long_grid

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}"
CALM, FORBIDDEN = [{"role": "user", "content": "calm"}], [{"role": "user", "content": "loop"}]


@pytest.mark.parametrize(("endless", "renderer"), mostly_long_grid([LOOP, MACRO], ["engine", "client"], every=3))
def test_a_template_that_loops_for_some_messages_refuses_them_alone(
    renderer: str, endless: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = copy_checkpoint(checkpoints("qwen3"), tmp_path / "model")
    template = "{% if messages[0].content == 'loop' %}" + endless + "{% endif %}{{ messages[0].content }}"
    settings = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    before = sys.gettrace()
    render = Tokenizer(folder, 1 << 20).encode_chat if renderer == "engine" else LocalTokenizer(folder).chat
    with pytest.raises(InvalidRequest, match="the chat template refused the messages: it takes more than 1 second"):
        render(FORBIDDEN)
    assert sys.gettrace() is before
    assert render(CALM)
