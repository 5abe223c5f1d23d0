"""What a job would cost, without a device."""
