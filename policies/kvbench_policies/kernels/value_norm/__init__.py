"""How large a value is after the output projection: `|| V W_O ||`, mean over the group."""
