"""`params_once`: a step's sampling parameters staged for draft and accept in one launch."""
