from datetime import datetime

import pytest

from gguf_pp.errors import TemplateError
from gguf_pp.tokenizer import ChatTemplate, sandbox
from tests.vocabs import stored

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<é>"}]


def render(source: str, **kwargs: object) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(MESSAGES, **kwargs)


def test_the_template_of_a_model_renders_and_encodes():
    tokenizer = stored("smollm2-135m")
    template = ChatTemplate(tokenizer.chat_template, bos="", eos="")
    rendered = template.render([{"role": "system", "content": "x"}, *MESSAGES[:1]])
    assert rendered == (
        "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat(rendered)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n"
         "  {% endif %}\n{% endfor %}\n", "hi\n"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{% continue %}x{% endfor %}",
         "1False2True"),
        ("{{ messages[1] | tojson }}", '{"role": "assistant", "content": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% set x %}ab{% endset %}{{ x + x ~ 1 ~ none }}", "abab1None"),
        ("{{ 7 % 4 }}{{ 2 ** 3 }}{{ '%s' % 'a' }}{{ [1] + [2] }}{{ 'a' * 2 }}", "38a[1, 2]aa"),
        ("{% macro f(a, b=1) %}{{ a }}{{ b }}{% endmacro %}{{ f(2) }}{{ f(2, b=3) }}", "2123"),
        ("{{ '{}-{}'.format(1, 2) }}{{ ' a '.strip().upper() }}{{ 'ab'[::-1] }}", "1-2Aba"),
        ("{{ tools is none }}{{ add_generation_prompt }}{{ missing is defined }}", "TrueTrueFalse"),
    ],
)  # fmt: skip
def test_templates_find_what_hugging_face_gives_them(source, expected):
    assert render(source) == expected


def test_more_variables_reach_the_template():
    assert render("{{ thinking }}{{ tools[0].n }}", thinking=1, tools=[{"n": 2}]) == "12"


def test_the_date_is_todays():
    before = datetime.now().strftime("%Y-%m-%d")
    rendered = render("{{ strftime_now('%Y-%m-%d') }}")
    assert rendered in (before, datetime.now().strftime("%Y-%m-%d"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for x in", "does not compile \\(line 2\\): unexpected 'end of template'"),
        ("{{ x | no_such }}", "does not compile \\(line 1\\): No filter named 'no_such'"),
        ("a\n\n{{ raise_exception('no system') }}", "does not render \\(line 3\\): no system"),
        ("a\n{{ messages[0].a.b }}", "does not render \\(line 2\\): .* has no attribute 'a'"),
        ("{{ 1 / 0 }}", "line 1\\): division by zero"),
        ("{{ 'a' + 1 }}", "line 1\\)"),
        ("{% include 'x' %}", "line 1\\)"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "does not compile: maximum recursion"),
    ],
)
def test_a_failing_template_is_named_with_its_line(source, message):
    with pytest.raises(TemplateError, match=message):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__.os }}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(source):
    with pytest.raises(TemplateError, match="unsafe"):
        render(source)


DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(99) %}STEP{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLING.replace("STEP", "{% set n.x = n.x ~ n.x %}"),
        DOUBLING.replace("STEP", "{% set n.x = n.x + n.x %}"),
        DOUBLING.replace("STEP", "{% set n.x = [n.x, n.x] %}"),
        DOUBLING.replace("STEP", "{% set n.x = [n.x, n.x] | join %}"),
        DOUBLING.replace("STEP", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 9 * ['a'] }}",
        "{{ 9 ** 99999 }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ [1] | batch(10 ** 10, 0) | list }}",
        "{{ '%99999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ [1] | tojson(indent=10 ** 10) }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_eat_the_memory(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CHARS", 1 << 16)
    with pytest.raises(TemplateError, match=r"grows beyond|seven digits|writes more|too big"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    ],
)
def test_a_template_cannot_run_for_ever(source, monkeypatch):
    monkeypatch.setattr("gguf_pp.tokenizer.template.MAX_SECONDS", 0.1)
    with pytest.raises(TemplateError, match="rendering takes longer"):
        render(source)
