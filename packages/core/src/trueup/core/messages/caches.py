"""Messages of cache writes, rotary embedding and matrix products."""
from trueup.core.messages.entry import Message, Text

MESSAGES = (
    Message(
        "fused-write-rows", Text("Rows of cos, sin and kv differ", "cos、sin 与 kv 的行数不等"),
        r"\b(?P<which>cos or sin|cos|sin) shape is invalid\.?\s*\[FUNC:\w+\]\[FILE:kv_rms_norm_rope_cache",
        "cos or sin shape is invalid.[FUNC:GetShapeAttrsInfo][FILE:kv_rms_norm_rope_cache_base_tiling.cpp][LINE:291]",
        "vllm-ascend issue #6243",
        Text("{which} must have one row for each row of kv, or one for all positions: (B, 1, S, 64) or (B, 1, 1, 64).",
             "{which} 应当与 kv 的行一一对应，或者各位置共用一行：(B, 1, S, 64) 或 (B, 1, 1, 64)。"),
        Text("One of kv, cos, sin and index was padded without the others, as under uneven data-parallel load. Cut or "
             "pad all four together before the call.",
             "kv、cos、sin、index 中有一个单独填充过，例如数据并行负载不均时。调用之前把四者一起截断或一起填充。"),
        ("npu_kv_rmsnorm_rope_cache", "npu_kv_rmsnorm_rope_cache_v2"), ("cos", "sin", "kv", "index"), "SB-05"),
    Message(
        "rope-rows", Text("Rows of cos, sin and x differ", "cos、sin 与 x 的行数不等"),
        r"cos or sin batchSize must same as x batchSize",
        "cos or sin batchSize must same as x batchSize.", "vllm-ascend issue #4769",
        Text("The first axis of cos and sin must be that of x.", "cos 和 sin 的第一个轴必须与 x 的相等。"),
        Text("Take the angles at the positions of the very rows that x holds, after padding.",
             "角度要在填充之后，按 x 里实际那些行的位置来取。"),
        ("npu_interleave_rope",), ("x", "cos", "sin"), "SB-05"),
    Message(
        "apply-rope-rows", Text("Rows of query, key, cos and sin differ", "query、key、cos、sin 的行数不等"),
        r"op\[ApplyRotaryPosEmb\], all input dim(?P<axis>\d) must equal",
        "op[ApplyRotaryPosEmb], all input dim1 must equal[FUNC:CheckParams][FILE:apply_rotary_pos_emb_tiling.cpp]"
        "[LINE:204]", "LMCache-Ascend issue #152",
        Text("Axis {axis} (the rows of a sequence) differs between query, key, cos and sin.",
             "第 {axis} 个轴（序列的行）在 query、key、cos、sin 之间不相等。"),
        Text("Take cos and sin at the positions of these rows, not of the whole sequence.",
             "cos 和 sin 要按这些行的位置来取，而不是整个序列。"),
        ("npu_apply_rotary_pos_emb",), ("query", "key", "cos", "sin"), "SB-05"),
    Message(
        "rotary-mul-bnsd", Text("Too many heads before the positions", "位置轴之前的头太多"),
        r"when input is BNSD layout and\s+B \* N is large or D is not aligned",
        "op[RotaryPositionEmbedding],\nwhen input is BNSD layout and  B * N is large or D is not aligned, please do "
        "not "
        "use RotaryPositionEmbedding fusion operator.", "ms-swift issue #9329",
        Text("B * N is large against S while cos and sin are shared by all heads.",
             "B * N 相对 S 太大，而 cos 和 sin 由所有头共用。"),
        Text("Put the heads behind the positions (B, S, N, D), or give cos and sin a batch axis.",
             "把头轴放到位置轴之后，即 (B, S, N, D)；或者给 cos 和 sin 加上 batch 轴。"),
        ("npu_rotary_mul",), ("input", "r1", "r2")),
    Message(
        "reshape-and-cache", Text("The cache write refuses its tensors", "缓存写入拒绝它的张量"),
        r"ReshapeAndCacheOperation setup failed",
        "ReshapeAndCacheOperation setup failed!", "vllm-ascend PR #6304",
        Text("ATB refuses a shape or a dtype and does not say which: slots must be int32, one for each row of key and "
             "value, and both caches (pages, page size, heads, width).",
             "ATB 拒绝了某个形状或数据类型，但不说是哪一个：槽位必须是 int32，key 和 value 每行一个；"
             "两个缓存的形状是（页数，页大小，头数，宽度）。"),
        Text("Check slot_indices first: int64 slots, as vLLM makes them, are refused (seen in vllm-ascend PR #706). "
             "Then compare its length with the rows of key.",
             "先查 slot_indices：vLLM 产生的 int64 槽位会被拒绝（见 vllm-ascend PR #706）。再看它的长度与 key "
             "的行数是否相等。"),
        ("_npu_reshape_and_cache",), ("slot_indices", "key", "value", "key_cache", "value_cache"), "SB-05"),
    Message(
        "quant-matmul-k", Text("The inner axes of a product differ", "矩阵乘的内侧轴不相等"),
        r"k dim of x1 and x2 need be same",
        "RuntimeError: k dim of x1 and x2 need be same,\nplease check k dim of x1 and x2", "vllm-ascend issue #17110",
        Text("The last axis of x1 and the first of x2 (the K of both) differ.",
             "x1 的最后一个轴与 x2 的第一个轴（两者的 K）不相等。"),
        Text("A weight is transposed, or packed (int4) where the call reads int8. Print both shapes, then the format "
             "of the weight.",
             "权重被转置了，或者是打包的 int4 而调用按 int8 读。打印两者的形状，再看权重的内存格式。"),
        ("npu_quant_matmul",), ("x1", "x2")),
)
