"""trueup explain: messages as people have met them, in reports that anybody can read, each to its cause and its pages.

That every message of our own contracts is explained is tested with the rules, in test_rules.py.
"""
import io
import json
import re
import subprocess
import sys

import pytest
import torch

from trueup.core import ContractError, capture, cli, load
from trueup.core.explain import explain, render
from trueup.core.messages import GROUPS, MESSAGES
from trueup.core.ops.reading.sheet import sheets

load()
FIA = "operators/npu_fused_infer_attention_score/"
# (where it was seen, the message, what the explanation must say, the first page, the case)
SEEN = [
    ("vllm-ascend issue #6524", "When layout is TND, queryT(21) must be equal to the last element of "
     "actualSequenceLengthQ(20)", "21 rows, the last cumulative query length is 20", FIA, "SB-03"),
    ("vllm-ascend issue #9088", "queryT(16) must be equal to the last element of actualSequenceLengthQ(13)",
     "16 rows, the last cumulative query length is 13", FIA, "SB-03"),
    ("vllm-ascend issue #8107", "the key/value's actual sequence lengths shape size is 9, it should be bigger or equal "
     "to batch size(16) or equal to 1", "9 key lengths and 16 requests", FIA, "SB-04"),
    ("vllm-ascend PR #10769", "The size(20) of actualSeqLengthsKv is not equal to the batchSize(21)",
     "20 key lengths and 21 requests", FIA, "SB-04"),
    ("vllm-ascend issue #10747", "The size(24) of actualSeqLengthsKv is not equal to the batchSize(25). The size of "
     "actualSeqLengthsKv must be equal to the batchSize when the layout of key/value is TND or NTD.[FUNC:"
     "CheckActualSeqLenKvDim][FILE:actual_seq_len_checker.cpp][LINE:157]", "24 key lengths and 25", FIA, "SB-04"),
    ("vllm-ascend PR #10769", "When page attention enable, block table shape should be [21, >=29], now is [20, 1104]. "
     "[FUNC:CheckBlockTableShape]", "20 rows for 21 requests, and 1104 columns where the longest request needs 29", FIA,
     "SB-04"),
    ("lmdeploy PR #4316", "the value of the key/value's actual sequence lengths[0] must be greater than or equal to 0, "
     "but it i       s -294[FUNC:ParseActualSeqLens][FILE:incre_flash_attention_tiling.cc][LINE:875]",
     "Request 0 has -294 keys", FIA, None),
    ("vllm-ascend PR #9632", "When layout is TND, queryD(256), keyD(256) and valueD(256) must be same equal "
                             "192/128/64, "
     "or queryD and keyD equal 192 and valueD equal 128.[FUNC:CheckInputShapeWhenLayoutIsTND]", "width 256", FIA, None),
    ("vllm-ascend issue #8045", "When layout is TND, queryD(128) or keyD(128) must be 192, valueD(128) must be "
     "192/128!", "width 128", FIA, None),
    ("vllm-ascend issue #4373", "When layout is TND, not support Page Attention", "block table", FIA, None),
    ("vllm-ascend issue #1451",
    "The allowed number of queries per kv when enabling both MLA and Graph mode only support "
     "{32, 64, 128}, Thus this is not supported for DeepSeek-V2-Lite, as it only has 16 attention heads",
     "one of 32, 64, 128", FIA, "SB-06"),
    ("sglang PR #23572", "EZ9999[PID: 243306] 2026-04-23-21:39:27.694.424 (EZ9999):  [CheckQShape] query layout is "
                         "BNSD, "
     "shape [1, 5, 25200, 128] should be equal to [1, 20, 25200, 128].[FUNC:CompareShape][FILE:fia_tiling_shape.cpp]"
     "[LINE:351]", "query is [1, 5, 25200, 128] in layout BNSD", FIA, None),
    ("vllm PR #8054", "attenMask should not be null when sparse_mode is 2.[FUNC:RunBigKernelTilingWithParams]",
     "sparse_mode 2 reads atten_mask", FIA, None),
    ("vllm-ascend PR #10520", "EZ9999 sparse_indices layout is TND, shape is [4096, 1, 2048],\n"
     "       expected shape is [512, 1, 2048].\n       [FUNC:CompareShape][FILE:sparse_flash_attention_tiling.cpp]",
     "sparse_indices is [4096, 1, 2048], query says [512, 1, 2048]", "operators/npu_sparse_flash_attention/", "SB-02"),
    ("sglang PR #32762", "actual_seq_lengths_query/key/block_table dim 0: 3/2/2",
     "3 query lengths, 2 key lengths and 2 rows of block_table", "operators/npu_lightning_indexer/", "SB-01"),
    ("ops-transformer: lightning_indexer_tiling.cpp", "TND case input actual_seq_lengths_query, "
     "actual_seq_lengths_key, block_table dim 0 are 4, 3, 3 respectively, they must be same.",
     "4 query lengths, 3 key lengths", "operators/npu_lightning_indexer/", "SB-01"),
    ("vllm-ascend issue #6243", "EZ9999[PID: 108300] 2026-01-15-06:35:20.425.815 (EZ9999):  cos or sin shape is "
     "invalid.[FUNC:GetShapeAttrsInfo][FILE:kv_rms_norm_rope_cache_base_tiling.cpp][LINE:291]\nTraceBack (most recent "
     "call last):\nKvRmsNormRopeCache do tiling failed, ret is -1.", "one row for each row of kv",
     "operators/npu_kv_rmsnorm_rope_cache/", "SB-05"),
    ("vllm-ascend issue #2732", "EZ9999: [PID: 191741] 2025-09-03-19:05:48.642.164 cos shape is invalid.[FUNC:"
     "GetShapeAttrsInfo][FILE:kv_rms_norm_rope_cache_tiling.cpp][LINE:298]", "cos must have one row",
     "operators/npu_kv_rmsnorm_rope_cache/", "SB-05"),
    ("vllm-ascend issue #4769", "cos or sin batchSize must same as x batchSize.", "first axis of cos and sin",
     "operators/npu_interleave_rope/", "SB-05"),
    ("LMCache-Ascend issue #152", "op[ApplyRotaryPosEmb], all input dim1 must equal[FUNC:CheckParams][FILE:"
     "apply_rotary_pos_emb_tiling.cpp][LINE:204]", "Axis 1", "operators/npu_apply_rotary_pos_emb/", "SB-05"),
    ("ms-swift issue #9329", "E89999[PID: 183646] 2026-04-01-13:43:00.810.813 (E89999):  op[RotaryPositionEmbedding],\n"
     "when input is BNSD layout and  B * N is large or D is not aligned, please do not use RotaryPositionEmbedding "
     "fusion operator.", "B * N is large", "operators/npu_rotary_mul/", None),
    ("vllm-ascend PR #6304", "ReshapeAndCacheOperation setup failed!", "slots must be int32",
     "operators/_npu_reshape_and_cache/", "SB-05"),
    ("vllm-ascend issue #17110", "RuntimeError: k dim of x1 and x2 need be same,\nplease check k dim of x1 and x2",
     "the K of both", "operators/npu_quant_matmul/", None),
    ("sglang issue #16498", "RuntimeError: graph_task_update_end:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:48 "
     "NPU function error: c10_npu::acl::AclmdlRICaptureTaskUpdateEnd(stream), error code is 507000",
     "called again with the new lengths", FIA, "SB-03"),
    ("torch_npu 2.13.0: torch_npu/npu/graphs.py",
    "Currently, there are 61 operators that need to be updated by capture, "
     "and there are only 2 elements in the incoming cpu_update_input list", "recorded 61 operators", FIA, "SB-12"),
    ("vllm-ascend issue #3263", "The extend info: errcode:(0x800000, 0x4000, 0) errorStr: The DDR address of the MTE "
     "instruction is out of range.CCU instruction address check error.", "does not say which", "bugs/#sb-09", "SB-09"),
    ("vllm-ascend issue #10122", "rtEventRecord execution failed, reason=aicore exception[FUNC:FuncErrorReason]",
     "says nothing about the cause", "how-to/explain/#capture", None),
    ("vllm-ascend issue #2763", "RuntimeError: ACL stream synchronize failed, error code:507035",
     "says nothing about the cause", "how-to/explain/#capture", None),
    ("vllm-ascend issue #4972", "query event recorded status failed, runtime result = 507014[FUNC:ReportCallError]",
     "did not end (507014)", "how-to/explain/#capture", None),
    ("vllm-ascend PR #6596", "RuntimeError: aclnnFusedInferAttentionScoreV3 failed, error code is 561002",
     "refused before anything ran", FIA, None),
    ("vllm-ascend issue #8512", "NPU function error: call aclnnFusedInferAttentionScoreV3 failed, error code is 161002",
     "is missing, or of a dtype", FIA, None),
    ("vllm-ascend issue #1440", "libascend_hal.so: cannot open shared object file: No such file or directory",
     "does not find libascend_hal.so", "how-to/doctor/", None),
    ("vllm-ascend issue #262", "ImportError: libhccl.so: cannot open shared object file: No such file or directory",
     "does not find libhccl.so", "how-to/doctor/", None),
    ("vllm-ascend issue #1440", "RuntimeError: Failed to load the backend extension: torch_npu. You can disable "
     "extension auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0.", "imports every installed backend",
     "how-to/doctor/", None),
    ("vllm-ascend issue #5056", "RuntimeError: aclnnLightningIndexer or aclnnLightningIndexerGetWorkspaceSize not in "
     "libopapi.so, or libopapi.sonot found.", "calls aclnnLightningIndexer", "operators/npu_lightning_indexer/", None),
    ("torch 2.13.0", "NotImplementedError: Could not run 'npu::npu_rotary_mul' with arguments from the 'CPU' backend. "
     "This could be because the operator doesn't exist for this backend", "no kernel for CPU tensors",
     "operators/npu_rotary_mul/", None),
    ("torch 2.13.0", "NotImplementedError: npu::_npu_fused_infer_attention_score_get_max_workspace: attempted to run "
     "this operator with Meta tensors, but there was no fake impl or Meta kernel registered.", "no Meta kernel", FIA,
     None),
    ("torch 2.13.0", "torch._subclasses.fake_tensor.UnsupportedOperatorException: "
     "npu._npu_fused_infer_attention_score_get_max_workspace.default", "no Meta kernel", FIA, None),
]


def pages(findings):
    return [text for finding in findings for label, text in finding.rows if label == "read"]


@pytest.mark.parametrize(("seen", "text", "says", "page", "case"), SEEN,
                         ids=[f"{seen[0]}-{i}" for i, seen in enumerate(SEEN)])
def test_a_message_as_it_was_met(seen, text, says, page, case):
    [found] = explain(text)
    rows = dict(found.rows)
    assert says in rows["broken"]
    assert pages([found])[0] == page
    assert rows.get("looks like", "").split(" ")[0] == (case or "")
    assert not case or f"bugs/#{case.lower()}" in pages([found])
    assert rows["change"] and "{" not in render([found])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_an_entry_of_the_table_is_whole(message):
    match = re.search(message.pattern, message.example, re.DOTALL)
    assert match
    for text in (message.broken, message.change):
        english, chinese = (sorted(re.findall(r"\{\w+\}", version)) for version in text)
        assert english == chinese and {name[1:-1] for name in english} <= match.groupdict().keys()
    assert set(message.sheets) <= sheets()
    assert message.sheets or message.pages
    assert re.search(r"(issue|PR) #\d+$|: |2\.13\.0", message.seen)


def test_names_are_anchors_and_unique():
    names = [message.name for message in MESSAGES] + list(GROUPS)
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


LOG = """\
(EngineCore pid=1) INFO 12-03 server starts
(Worker_TP0 pid=7) ERROR 02-04 09:19:40 RuntimeError: call aclnnFusedInferAttentionScoreV3 failed, error code is 561002
(Worker_TP0 pid=7) ERROR 02-04 09:19:40 E89999[PID: 7] (E89999):  When layout is TND, queryT(21) must be equal to the \
last element of actualSequenceLengthQ(20)[FUNC:CheckFAISeqlenDataInTND][LINE:904]
(Worker_TP1 pid=8) ERROR 02-04 09:19:40 E89999[PID: 8] (E89999):  When layout is TND, queryT(21) must be equal to the \
last element of actualSequenceLengthQ(20)[FUNC:CheckFAISeqlenDataInTND][LINE:904]
"""


def test_of_a_log_the_cause_is_told_once_and_the_bare_code_is_not():
    [found] = explain(LOG)
    assert "21 rows" in dict(found.rows)["broken"]


def test_our_own_message_in_a_log_is_explained_with_what_was_said():
    with pytest.raises(ContractError) as error:
        torch.ops.npu.npu_scatter_pa_kv_cache(torch.zeros(3, 1, 512), torch.zeros(3, 1, 64), torch.zeros(2, 16, 1, 512),
                                              torch.zeros(2, 16, 1, 64), torch.tensor([16, 17]), cache_mode="Norm")
    log = "".join(f"(Worker pid=1) ERROR 12:00:01 {line}\n" for line in f"ContractError: {error.value}".splitlines())
    [found] = explain(f"noise\n{log}noise\n")
    rows = dict(found.rows)
    assert rows["broken"].startswith("slot_mapping is 2 rows") and rows["change"].startswith("expected: 3 rows, as key")
    assert rows["refused when"] and rows["looks like"].startswith("SB-05")
    assert pages([found]) == ["operators/npu_scatter_pa_kv_cache/", "bugs/#sb-05"]


def test_an_unknown_message_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["explain", "Segmentation fault"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "known" in err and "trueup.core.capture('calls.json')" in err


def test_from_a_file_from_standard_input_and_from_the_command_line(tmp_path, capsys, monkeypatch):
    file = tmp_path / "server.log"
    file.write_text(LOG)
    said = []
    monkeypatch.setattr(sys, "stdin", io.StringIO(LOG))
    for what in (str(file), "-", LOG):
        assert cli.main(["explain", what]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and "SB-03 in the bug gallery" in said[0]
    assert cli.main(["explain", "lost.log"]) == 2
    assert "there is no file lost.log" in capsys.readouterr().err


def test_a_devices_message_needs_no_torch():
    code = ("import sys; from trueup.core import cli; cli.main(['explain', "
            "'The size(20) of actualSeqLengthsKv is not equal to the batchSize(21)']); assert 'torch' not in "
            "sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "20 key lengths" in done.stdout, done.stderr


def test_a_recording_names_the_calls_the_rules_and_the_error(tmp_path, capsys):
    file = tmp_path / "calls.json"
    x = torch.ones(3, 8)
    with pytest.raises(RuntimeError, match="561002"), capture(file):
        torch.ops.npu.npu_swiglu(x)
        for _ in range(2):
            torch.ops.npu.npu_interleave_rope(torch.ones(1, 1, 1, 64), *[torch.ones(1, 1, 1, 64)] * 2)  # float32
        raise RuntimeError("call aclnnRmsNorm failed, error code is 561002")
    assert cli.main(["explain", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 calls, under the rules of a device" in out and "2 calls break a rule" in out
    assert "ended by RuntimeError: call aclnnRmsNorm failed, error code is 561002, outside an operator call" in out
    assert "npu_interleave_rope refuses x (calls 2, 3, 2 in all)" in out
    assert "operators/npu_interleave_rope/" in out and "operators/npu_rms_norm/" in out


def test_a_recording_without_a_fault_says_so():
    with capture() as record:
        torch.ops.npu.npu_swiglu(torch.ones(3, 8))
    [found] = explain(json.dumps({"capture": 1, "calls": record.calls}))
    assert "no rule" in dict(found.rows)["broken"]


def test_lines_fit_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, render(explain(LOG)).splitlines())) <= 70
