// NVIDIA's NRI plugin by itself: its own program for it is the installer of the whole toolkit.
package main

import (
	"context"
	"log"
	"os"

	"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk-installer/container/runtime/nri"
	"github.com/sirupsen/logrus"
)

func main() {
	plugin := nri.NewPlugin(context.Background(), logrus.New(), nil)
	if err := plugin.Start(context.Background(), os.Args[1], "10"); err != nil {
		log.Fatal(err)
	}
	select {}
}
