"""Issue point 12: what a template reads is in its syntax tree, not in its letters."""

from typing import Any

import jinja2
import pytest

from specdec_cli.text.template import read_template


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{{ enable_thinking }}", {"enable_thinking"}),
        ("{% if enable_thinking is defined and not enable_thinking %}x{% endif %}", {"enable_thinking"}),
        ("{% if not tools is defined or tools is none %}{% set tools = [] %}{% endif %}{{ tools }}", {"tools"}),
        ("{% set tools = custom_tools or tools %}{{ tools }}", {"tools", "custom_tools"}),
        ("{% set tools = [] %}{{ tools }}", set()),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", {"messages"}),
        ("{% macro f(tools) %}{{ tools }}{% endmacro %}{{ f(1) }}", set()),
        ("{% macro f() %}{{ thinking }}{% endmacro %}{{ f() }}", {"thinking"}),
        ("{# tools #} tools {{ 'tools' }} {{ x.tools }}", {"x"}),
        ("{{ raise_exception('a') }}{{ strftime_now('%Y') }}{{ range(2) }}{{ namespace(a=1) }}", set()),
        ("{% generation %}{{ inside }}{% endgeneration %}", {"inside"}),
        ("{% for a in b %}{% if a %}{% break %}{% endif %}{% continue %}{% endfor %}", {"b"}),
    ],
)
def test_12_variables_are_those_that_are_looked_up(source: str, variables: set[Any]) -> None:
    assert read_template(source).variables == variables


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.tool_calls }}{% endfor %}",
        "{% for m in messages %}{{ m['tool_calls'] }}{% endfor %}",
        "{% for m in messages %}{{ m.get('tool_calls') }}{% endfor %}",
        "{% for m in messages %}{% if 'tool_calls' in m %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% for k, v in m.items() %}{{ k }}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{{ m | tojson }}{% endfor %}",
        "{{ messages | tojson }}",
        "{{ messages | selectattr('tool_calls') | list }}",
        "{{ messages | map(attribute='tool_calls') | list }}",
        "{% macro f(m) %}{{ m.tool_calls }}{% endmacro %}",
    ],
)
def test_12_a_field_is_read_in_every_way_of_writing_it(source: str) -> None:
    assert read_template(source).has_field("tool_calls")


@pytest.mark.parametrize(
    "source",
    [
        "tool_calls {# m.tool_calls #}{{ 'tool_calls' }}",
        "{{ tool_calls }}",
        "{% set ns = namespace(tool_calls=1) %}{{ ns.tool_calls }}",
        "{{ m.tool_calls_begin }}{{ m['tool_call'] }}",
        "{% for t in tools %}{{ t | tojson }}{% endfor %}",
        "{% raw %}{{ m.tool_calls }}{% endraw %}",
    ],
)
def test_12_a_word_that_merely_occurs_is_not_read(source: str) -> None:
    assert not read_template(source).has_field("tool_calls")


def test_12_roles_are_what_something_is_compared_with() -> None:
    assert "developer" in read_template("{% if m.role in ['system', 'developer'] %}{% endif %}").texts
    assert "developer" in read_template("{{ {'developer': 1}[m.role] }}").texts
    assert "developer" not in read_template("developer {{ 'developer' }}").texts


def test_12_a_broken_template_is_told() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        read_template("{% for %}")
