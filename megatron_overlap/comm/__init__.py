"""Every collective and send or receive, each owned by a Pending."""

from megatron_overlap.comm.channel import Channel
from megatron_overlap.comm.channels import Channels, open_channels
from megatron_overlap.comm.pending import Label, Ledger, Pending

__all__ = ["Channel", "Channels", "Label", "Ledger", "Pending", "open_channels"]
