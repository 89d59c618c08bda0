"""Norm of values after the output projection, `|| V W_O ||`, averaged over the group."""
