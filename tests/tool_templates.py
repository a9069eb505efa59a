"""Small chat templates in the forms of well-known models' own: how each declares tools and writes earlier calls."""

from __future__ import annotations

_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_DECLARED = "{% if tools %}<|system|>\nTOLD{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|end|>\n{% endif %}"


def template(calls: str, told: str = "You have these tools:") -> str:
    return _DECLARED.replace("TOLD", told) + _TURNS.replace("CALLS", calls)


def each(call: str) -> str:
    return "{% for c in m.tool_calls %}{% set c = c.function %}" + call + "{% endfor %}"


_DEEPSEEK_V3 = each(
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.name + '\\n```json\\n' + c.arguments + '\\n```' }}"
    "<｜tool▁call▁end｜>{{ '' if loop.last else '\\n' }}"
)
_XML = (
    "{{ '<function=' + c.name + '>\\n' }}{% for k, v in c.arguments|items %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n"
    "{% endfor %}</function>\n"
)
_PYTHON = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_COMMA = "{% if not loop.last %}, {% endif %}"
_NAMED = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'

TEMPLATES: dict[str, tuple[str, str]] = {
    "Qwen2.5": ("hermes", template(each("\n<tool_call>\n" + _NAMED + "\n</tool_call>"))),
    "Qwen3, arguments as they are": (
        "hermes",
        template(
            each(
                '\n<tool_call>\n{"name": "{{ c.name }}", "arguments": {% if c.arguments is string %}{{ c.arguments }}'
                "{% else %}{{ c.arguments | tojson }}{% endif %}}\n</tool_call>"
            )
        ),
    ),
    "Qwen3-Coder": ("qwen3_coder", template(each("\n<tool_call>\n" + _XML + "</tool_call>"))),
    "Seed-OSS": (
        "seed_oss",
        template(
            each(
                "\n<seed:tool_call>\n{{ '<function=' + c.name + '>\\n' }}{% for k, v in c.arguments|items %}"
                "{{ '<parameter=' + k + '>' }}{{ v | tojson if v is mapping else v | string }}</parameter>\n"
                "{% endfor %}</function>\n</seed:tool_call>"
            )
        ),
    ),
    "MiniMax-M2": (
        "minimax_m2",
        template(
            "\n<minimax:tool_call>\n"
            + each(
                '<invoke name="{{ c.name }}">\n{% for k, v in c.arguments|items %}<parameter name="{{ k }}">'
                "{{ v | tojson if v is not string else v }}</parameter>\n{% endfor %}</invoke>\n"
            )
            + "</minimax:tool_call>"
        ),
    ),
    "GLM-4.6": (
        "glm45",
        template(
            each(
                "{{ '\\n<tool_call>' + c.name }}\n{% set _args = c.arguments or {} %}{% for k, v in _args.items() %}"
                "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n"
                "{% endfor %}</tool_call>"
            )
        ),
    ),
    "DeepSeek-V3": ("deepseek", template("<｜tool▁calls▁begin｜>" + _DEEPSEEK_V3 + "<｜tool▁calls▁end｜>")),
    "DeepSeek-V3.1": (
        "deepseek",
        template(
            "<｜tool▁calls▁begin｜>"
            + each("{{ '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.arguments + '<｜tool▁call▁end｜>' }}")
            + "<｜tool▁calls▁end｜>"
        ),
    ),
    "Llama 3.1": (
        "llama3_json",
        "{% for m in messages %}<|{{ m.role }}|>\n\n{% if 'tool_calls' in m %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "{% set c = m.tool_calls[0].function %}"
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% else %}'
        "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}",
    ),
    "Llama 4 pythonic": ("pythonic", template("[" + each(_PYTHON + _COMMA) + "]")),
    "LFM2": ("pythonic", template("<|tool_call_start|>[" + each(_PYTHON + _COMMA) + "]<|tool_call_end|>")),
    "Olmo 3": ("olmo3", template("<function_calls>\n" + each(_PYTHON + "\n") + "</function_calls>")),
    "Mistral": (
        "mistral",
        "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
        "{% for t in m.tool_calls %}{{ (t.function | tojson)[:-1] }}{% if not t.id is defined or t.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        ', "id": "{{ t.id }}"}' + _COMMA + "{% endfor %}]</s>{% elif m.role == 'tool' %}"
        "{% if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
    ),
    "Mistral, name first": (
        "mistral",
        template(each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}")),
    ),
    "Kimi-K2": (
        "kimi_k2",
        template(
            "<|tool_calls_section_begin|>{% for t in m.tool_calls %}<|tool_call_begin|>functions.{{ t.function.name }}:"
            "{{ loop.index0 }}<|tool_call_argument_begin|>{{ t.function.arguments | tojson }}<|tool_call_end|>"
            "{% endfor %}<|tool_calls_section_end|>"
        ),
    ),
    "Kimi-K2-Thinking": (
        "kimi_k2",
        template(
            "<|tool_calls_section_begin|>{% for t in m.tool_calls %}<|tool_call_begin|>{{ t.id }}"
            "<|tool_call_argument_begin|>{% if t.function.arguments is string %}{{ t.function.arguments }}{% else %}"
            "{{ t.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
        ),
    ),
    "Granite": ("granite", template("<|tool_call|>[" + each(_NAMED + _COMMA) + "]")),
    "Jamba": ("jamba", template("<tool_calls>[\n" + each(_NAMED + _COMMA) + "\n]</tool_calls>")),
    "instructions only": (
        "qwen3_coder",
        template("", "Reply with <tool_call>\n<function=example_name>\n<parameter=a>\n1\n</parameter></function>"),
    ),
    "instructions of Llama": (
        "llama3_json",
        template("", 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.'),
    ),
}
UNKNOWN: dict[str, str] = {
    "a mark that nobody knows": template("<<CALL>>" + each(_NAMED)),
    "the word alone": template("", "Never write <tool_call> or </tool_call>."),
    "harmony": template(each("<|channel|>commentary to=functions.{{ c.name }}<|message|>{{ c.arguments | tojson }}")),
    "no calls": template(""),
}
