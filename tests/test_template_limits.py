"""Chat templates that would take all memory or never end, and the ordinary ones beside them."""

from typing import Any

import jinja2
import pytest
from tiny_engine import letter_tokenizer

from specdec_cli import template_limits
from specdec_cli.errors import UsageError
from specdec_cli.lm.template_limits import limit_templates
from specdec_cli.text.chat_template import chat_tokenizer
from specdec_cli.text.template import read_template
from specdec_cli.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"

limit_templates()


def rendered(template: str, messages: Any = USER) -> str:
    return Tokenizer(letter_tokenizer(), template).render_chat(messages)


LARGE = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 'a' * 1000000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(width) }}".replace("width", "1000000000"),
    "{{ 'x'.zfill(1000000000) }}",
    "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "{{ ('b' * 100000).join([''] * 100000) }}",
    "{{ (['x' * 100000] * 100000)|join }}",
    "{{ range(99999)|map('center', 99999)|list }}",
    "{{ ('a\\n' * 100000)|indent(100000) }}",
    "{{ ('a ' * 100000)|wordwrap(1, wrapstring='b' * 100000) }}",
    "{{ [1]|tojson(indent=1000000000) }}",
    "{{ messages|batch(1000000000, 'x')|list }}",
    "{{ messages|slice(1000000000)|list }}",
    "{{ ([[1]] * 10000)|sum(start=[]) }}",
    "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "{{ ('%(a)s' * 100000)|format(a='x' * 100000) }}",
    "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{{ 10**100000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(a='aa') %}" + LOOP + "{% set ns.a = ns.a ~ ns.a %}" + END,
    "{% set ns = namespace(a='aa') %}" + LOOP + "{% set ns.a = ns.a + ns.a %}" + END,
    "{% set ns = namespace(a='aa') %}" + LOOP + "{% set ns.a = [ns.a, ns.a]|join %}" + END,
    "{% set ns = namespace(a=[1]) %}" + LOOP + "{% set ns.a = [ns.a, ns.a] %}" + END,
    "{% set ns = namespace(a=[1]) %}" + LOOP + "{% set ns.a = (ns.a + ns.a)|batch(9)|list %}" + END,
    "{% set ns = namespace(a={}) %}" + LOOP + "{% set ns.a = {'a': ns.a, 'b': ns.a} %}" + END,
    "{% set ns = namespace(a=namespace()) %}" + LOOP + "{% set ns.a = namespace(x=[ns.a, ns.a]) %}" + END,
    LOOP + "{{ 'a' * 1000 }}" + END,
    LOOP + "a" * 1000 + END,
    "{% autoescape 'a' * 10**9 %}{% endautoescape %}",
    "{% set x %}" + LOOP + "a" * 1000 + END + "{% endset %}",
]


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("template", LARGE, ids=[template[:60] for template in LARGE])
def test_49_21_a_template_that_makes_too_much_is_refused(template: str) -> None:
    with pytest.raises(
        UsageError, match=r"the chat template of `.*` (costs too much to render|is broken): it|with a num"
    ):
        rendered(template)


LONG = [
    LOOP * 3 + END * 3,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "{% for m in [messages] recursive %}" + "{{ loop(m) if m is not string }}" * 9 + END + LOOP * 2 + END * 2,
    LOOP + "{% if 'b' in 'a' * 8000000 %}{% endif %}" + END,
]


@pytest.mark.parametrize("template", LONG, ids=[template[:60] for template in LONG])
def test_49_21_a_template_that_takes_too_long_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    with pytest.raises(UsageError, match=r"costs too much to render: it (takes more than 0.2 s|makes more than)"):
        rendered(template)


BROKEN = [
    "x" * (template_limits.MAX_SOURCE + 1),
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
]


@pytest.mark.parametrize("template", BROKEN, ids=["long", "parentheses", "blocks"])
def test_49_21_a_template_that_cannot_be_compiled_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match=r"the chat template"):
        rendered(template)


@pytest.mark.parametrize("template", [LARGE[0], LARGE[10], LARGE[11], LARGE[12], LARGE[31], *BROKEN])
def test_49_21_a_template_is_read_without_computing_anything(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(*_: Any) -> None:
        raise AssertionError("it was computed")

    monkeypatch.setattr(jinja2.nodes.BinExpr, "as_const", computed)
    if template in BROKEN:
        with pytest.raises(jinja2.TemplateSyntaxError):
            read_template(template)
    else:
        read_template(template)


def test_49_21_ordinary_templates_say_what_they_said() -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}"
        "{{ m.role ~ ':' ~ m['content'] | trim }}{% if m.role in ['user', 'tool'] %}?{% endif %} {% endfor %}"
        "{{ [1, 2] + [3] }}{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ {'a': 1}|tojson }}"
        "{{ 'x'.join(['a', 'b']) }}{{ '%05d'|format(3) }}{{ messages|map(attribute='role')|join(',') }}"
        "{{ messages[1:]|list|length }}{{ '{:>3}'.format('a') }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 2 }}{{ 'ab' * 2 }}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}{% for i in range(3) %}{{ i }}{% endfor %}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{% generation %}g{% endgeneration %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.length }}{% break %}{% endfor %}"
        "{% macro f(a, b=2) %}{{ a + b }}{% endmacro %}{{ f(1) }}{{ messages|last|tojson(indent=1)|length }}"
    )
    assert rendered(template) == (
        '1/2user:ab? 2/2!assistant:cd [1, 2, 3]2{"a": 1}axb00003user,assistant1  a102431ababa=10121g1342'
    )


def test_49_21_a_long_conversation_is_no_hostile_one() -> None:
    messages = [{"role": "user", "content": "a" * 1000}] * 4000
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content|trim }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    )
    assert len(rendered(template, messages)) == 4000 * 1006


def test_49_21_looking_at_all_messages_for_each_is_no_hostile_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """The items looked at are few: none for a length, an end of a list or a sum of lists."""
    template = (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}{{ messages|length }}{{ (messages|last).role }}"
        "{% set ns.all = ns.all + [m] %}{{ messages|selectattr('role', 'equalto', 'tool')|first is defined }}"
        "{% endfor %}{{ ns.all|length }}"
    )
    charged: list[int] = []
    charge = template_limits._budget.charge
    monkeypatch.setattr(template_limits._budget, "charge", lambda size=1: charged.append(size) or charge(size))
    text = rendered(template, [{"role": "user", "content": "a" * 100}] * 200)
    assert text.endswith("False200")
    assert sum(charged) < 200 * 200 * 3


def test_49_21_a_template_of_the_command_line_is_checked_as_well() -> None:
    tokenizer = chat_tokenizer(letter_tokenizer(), "{{ 'a' * 10**9 }}", None)
    with pytest.raises(UsageError, match="costs too much to render"):
        tokenizer.chat(USER)
    with pytest.raises(UsageError, match="is broken: it is nested too deep"):
        chat_tokenizer(letter_tokenizer(), BROKEN[1], None)
