"""Spans of compute, communication and waiting, and the exposure computed from them."""

from megatron_overlap.timeline.exposure import COMMUNICATION_LANES as COMMUNICATION_LANES
from megatron_overlap.timeline.exposure import KindSummary as KindSummary
from megatron_overlap.timeline.exposure import send_times as send_times
from megatron_overlap.timeline.exposure import summarize as summarize
from megatron_overlap.timeline.spans import Lane as Lane
from megatron_overlap.timeline.spans import MessageKey as MessageKey
from megatron_overlap.timeline.spans import OpenSpan as OpenSpan
from megatron_overlap.timeline.spans import Recorder as Recorder
from megatron_overlap.timeline.spans import Recording as Recording
from megatron_overlap.timeline.spans import Span as Span
