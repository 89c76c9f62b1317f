"""The gauges of a run as the broker knows them. Pure."""

from broker.core.state import BrokerState


def gauges_of(state: BrokerState) -> dict[str, float]:
    """Return the broker's gauges, and the merged gauges of generators and actors."""
    return {
        **state.peers.gauges(),
        "broker/queue_depth_segments": float(len(state.store)),
        "broker/queued_bytes": float(state.store.nbytes),
        "broker/tasks_queued": float(state.tasks.queued),
        "broker/tasks_leased": float(state.tasks.leased),
        "broker/units_ready": float(state.deliveries.ready),
        "broker/units_leased": float(state.deliveries.leased),
        "broker/units_committed": float(state.deliveries.committed),
        "broker/journal_aside_bytes": float(state.store.committed_nbytes),
        "broker/length_bias_tokens": state.ledger.lengths.bias_tokens,
        "broker/length_distance_tokens": state.ledger.lengths.distance_tokens,
        "broker/ledger_stored_tokens": float(state.ledger.stored.tokens),
        "broker/ledger_held_tokens": float(state.ledger.held_tokens),
        "broker/ledger_rolled_back_tokens": float(state.ledger.rolled_back.tokens),
        **{
            f"broker/ledger_{outcome}_tokens": float(tally.tokens)
            for outcome, tally in state.ledger.outcomes.items()
        },
    }
