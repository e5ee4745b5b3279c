"""Dense attention: npu_fused_infer_attention_score in both versions, and what graphs need around it."""
from operators.case import Case, Wrong
from operators.case_fia_around import (
    OUT,
    SHAPES,
    SHAPES_V2,
    UNBUILT_V1,
    UNBUILT_V2,
    infer_output,
    naive_infer_output,
    naive_out,
    naive_workspace,
    with_out,
)
from operators.case_fia_calls import call_v1, call_v2, v1_names
from operators.case_fia_naive import V1, V2, naive_v1, naive_v2
from operators.case_fia_wrong import LAYOUT, LENGTHS, MASKS
from operators.case_fia_wrong_keys import PAGES, ROPES, VERSION_2


def v2_names(call):
    return {V2.get(name, name): x for name, x in call.items()}


def v1(wrong: list[Wrong]) -> list[Wrong]:
    """The same for version 1, which has other names for some arguments."""

    def renamed(w: Wrong) -> Wrong:
        message = w.message
        for new, old in V1.items():
            message = message.replace(new, old)
        return w._replace(message=message, change=lambda c: v1_names(w.change(v2_names(c))),
                          of=lambda r: v1_names(w.of(r)))

    return [renamed(w) for w in wrong]


def naive_infer_output_v1(query, value, **named):
    return naive_infer_output(query, value, **v2_names(named))


WRONG = LAYOUT + LENGTHS + MASKS + ROPES + PAGES
FEW = LAYOUT[:1] + LENGTHS[-5:-3] + ROPES[:1] + PAGES[:1]  # the rules are one and the same

CASES = {
    "npu_fused_infer_attention_score": Case(call_v1, naive_v1, v1(WRONG) + UNBUILT_V1),
    "npu_fused_infer_attention_score_v2": Case(call_v2, naive_v2, WRONG + VERSION_2 + UNBUILT_V2),
    "npu_fused_infer_attention_score.out": Case(with_out(call_v1, naive_v1), naive_out(naive_v1), v1(OUT)),
    "npu_fused_infer_attention_score_v2.out": Case(with_out(call_v2, naive_v2), naive_out(naive_v2), OUT),
    "_npu_fused_infer_attention_score_get_max_workspace": Case(call_v1, naive_workspace, v1(FEW)),
    "_npu_fused_infer_attention_score_v2_get_max_workspace": Case(call_v2, naive_workspace, FEW),
    "_npu_fused_infer_attention_score_infer_output": Case(infer_output(call_v1), naive_infer_output_v1, v1(SHAPES)),
    "_npu_fused_infer_attention_score_v2_infer_output": Case(
        infer_output(call_v2), naive_infer_output, SHAPES + SHAPES_V2),
}
