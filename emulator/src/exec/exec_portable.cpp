#define VARIANT portable
#include "exec/exec_impl.h"
