"""Messages of graphs, and error codes that name no cause."""
from trueup.core.messages.attention import FIA
from trueup.core.messages.entry import Message, Text

HOW = ("how-to/explain/#capture",)

MESSAGES = (
    Message(
        "graph-update-count", Text("A graph update for another number of operators", "计算图更新的算子个数不对"),
        r"there are (?P<recorded>\d+) operators that need to be updated by capture, and there are only (?P<given>\d+) "
        r"elements",
        "Currently, there are 4 operators that need to be updated by capture, and there are only 2 elements in the "
        "incoming cpu_update_input list", "torch_npu 2.13.0: torch_npu/npu/graphs.py",
        Text("The graph recorded {recorded} operators with host lengths, the update brings {given}: one for each, or "
             "one for all.", "计算图录制了 {recorded} 个带主机长度的算子，更新只给了 {given} 份：应当每个算子一份，"
                             "或者全体共用一份。"),
        Text("Pass one dictionary that all layers share, or one for each operator in the order of capture.",
             "传一个各层共用的字典，或者按录制顺序给每个算子一个。"),
        FIA, ("cpu_update_input",), "SB-12"),
    Message(
        "graph-update-refused", Text("The update of a graph fails", "计算图更新失败"),
        r"AclmdlRICaptureTaskUpdate(?:End|Begin)\(\w+(?:, ?\w+)?\), error code is (?P<code>\d+)",
        "RuntimeError: graph_task_update_end:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:48 NPU function error: "
        "c10_npu::acl::AclmdlRICaptureTaskUpdateEnd(stream), error code is 507000", "sglang issue #16498",
        Text("Between update begin and end the recorded operator is called again with the new lengths, and that call "
             "was refused or never came.",
             "更新的开始与结束之间，会用新长度再调用一次录制的算子；这次调用被拒绝，或者根本没有发生。"),
        Text("The new lengths must fit the size that was captured: the last cumulative query length is the captured "
             "number of rows, with padded requests behind the real ones. Check the keys, too: one that the recorded "
             "call does not have is ignored, and the lengths of the capture stay (actual_seq_lengths and "
             "actual_seq_lengths_kv in the first version, actual_seq_qlen and actual_seq_kvlen in v2).",
             "新长度必须符合录制时的尺寸：最后一个累计查询长度等于录制的行数，真实请求后面是填充出来的请求。"
             "还要检查键名："
             "录制的调用里没有的键会被忽略，录制时的长度原样留着（第一版是 actual_seq_lengths 和 "
             "actual_seq_lengths_kv，"
             "v2 是 actual_seq_qlen 和 actual_seq_kvlen）。"),
        FIA, ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen"), "SB-03",
        ("bugs/#sb-12",)),
    Message(
        "graph-not-updatable", Text("A graph that cannot be updated", "无法更新的计算图"),
        r"current graph configuration does not support update",
        "The current graph configuration does not support update,Try to capture by setting auto_dispatch_capture=True "
        "during capture", "torch_npu 2.13.0: torch_npu/npu/graphs.py",
        Text("The graph was captured without auto_dispatch_capture, so host lengths are those of the capture forever.",
             "录制时没有打开 auto_dispatch_capture，所以主机长度永远是录制时的。"),
        Text("Capture with torch.npu.graph(..., auto_dispatch_capture=True), or update the tasks yourself.",
             "用 torch.npu.graph(..., auto_dispatch_capture=True) 录制，或者自己更新各个任务。"),
        FIA, case="SB-12"),
    Message(
        "address-out-of-range", Text("A kernel read or wrote outside its memory", "内核读写了自己内存之外的地址"),
        r"The DDR address of the MTE instruction is out of range",
        "errorStr: The DDR address of the MTE instruction is out of range.", "vllm-ascend issue #3263",
        Text("Some index led out of a tensor: a page id in a block table, a slot, a top-k entry, or a length that is "
             "longer than its row. The device does not check them and does not say which it was.",
             "某个下标越出了张量：块表里的页号、槽位、top-k 的条目，或者比所在行更长的长度。设备不检查它们，"
             "也不说是哪一个。"),
        Text("Look for 'fault kernel_name' or 'kernel_name=' near it: this kernel failed, the traceback is of a later "
             "call. Record the calls before it and check them: contracts do look at every page id and slot.",
             "在附近找 'fault kernel_name' 或 'kernel_name='：出错的是那个内核，调用栈属于后面的某次调用。"
             "把之前的调用记录下来再检查：契约会查看每个页号和槽位。"),
        case="SB-09", pages=(*HOW, "bugs/#sb-16", "bugs/#sb-25")),
    Message(
        "aicore", Text("A kernel failed on the device", "内核在设备上出错"),
        r"error code(?: is|:) ?(?P<code>5070(?:15|35|14))|runtime result = (?P<result>5070(?:15|35|14))|"
        r"reason=\[?(?:aicore|vector core) (?:exception|timeout)",
        "rtEventRecord execution failed, reason=aicore exception", "vllm-ascend issue #10122",
        Text("A kernel crashed (507015, 507035) or did not end (507014). By itself this says nothing about the cause, "
             "and the traceback shows where the device was waited for, not the call that failed.",
             "某个内核崩溃了（507015、507035），或者没有结束（507014）。仅凭这些看不出原因；调用栈是等待设备的地方，"
             "不是出错的那次调用。"),
        Text("Run again with ASCEND_LAUNCH_BLOCKING=1 inside trueup.core.capture('calls.json'), then `trueup explain "
             "calls.json`. Where no rule is broken there, it is the kernel's fault or the machine's: report it with "
             "the recording.",
             "设 ASCEND_LAUNCH_BLOCKING=1，放进 trueup.core.capture('calls.json') 里再跑一次，然后 `trueup explain "
             "calls.json`。"
             "如果没有违反任何规则，就是内核或机器的问题：带上这份记录去报告。"),
        pages=HOW, bare=True),
    Message(
        "refused-561002", Text("The host refuses a call", "主机侧拒绝了调用"),
        r"(?P<call>aclnn\w+) failed, error code is 56100[0-9]",
        "RuntimeError: call aclnnFusedInferAttentionScoreV3 failed, error code is 561002", "vllm-ascend PR #6596",
        Text("{call} was refused before anything ran: its shapes, lengths or options do not fit each other. The code "
             "does not say which.", "{call} 在执行之前就被拒绝了：形状、长度或选项之间不相符。错误码不说是哪一个。"),
        Text("The reason stands a few lines further, behind (E89999) or (EZ9999), and ends in [FUNC:...]: explain the "
             "whole log. Where it is not there, record the call and explain the recording.",
             "原因在后面几行，(E89999) 或 (EZ9999) 之后，以 [FUNC:...] 结尾：把整份日志交给 explain。日志里没有时，"
             "把调用记录下来，再解释这份记录。"),
        pages=HOW, bare=True),
    Message(
        "refused-161002", Text("The interface refuses an argument", "接口拒绝了某个参数"),
        r"(?P<call>aclnn\w+) failed, error code is 16100[0-9]",
        "NPU function error: call aclnnFusedInferAttentionScoreV3 failed, error code is 161002",
        "vllm-ascend issue #8512",
        Text("{call} got an argument that is missing, or of a dtype, shape or option that its interface does not take.",
             "{call} 收到的某个参数缺失，或者数据类型、形状、选项不被接口接受。"),
        Text("Compare the call with its sheet: dtypes first. AclNN_Parameter_Error in the log may name the argument.",
             "对照契约页检查调用，先看数据类型。日志里的 AclNN_Parameter_Error 可能指出了参数。"),
        pages=HOW, bare=True),
)
